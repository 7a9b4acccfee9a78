#!/usr/bin/env bash
# docs/cluster.md: bash scripts/run_search_r1_qwen3_30b.sh [overlay.yaml ...] [a.b=c ...] [--resume] [--dry-run]
source "$(dirname "${BASH_SOURCE[0]}")/launch_env.sh"

exec megarl train recipes/search_r1_qwen3_30b.yaml "$@"
