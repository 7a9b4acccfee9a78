#!/usr/bin/env bash
# docs/cluster.md: bash scripts/run_grpo_qwen3_5_35b.sh [overlay.yaml ...] [a.b=c ...] [--resume] [--dry-run]
source "$(dirname "${BASH_SOURCE[0]}")/launch_env.sh"

exec megarl train recipes/grpo_qwen3_5_35b.yaml "$@"
