#!/usr/bin/env bash
# Everything from a fresh clone to a model that learnt to add: bash scripts/quickstart.sh [a.b=c ...]
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

[[ -f models/tiny-qwen3-moe/config.json ]] || python scripts/make_tiny_moe.py --out models/tiny-qwen3-moe
[[ -f data/train.jsonl && -f data/eval.jsonl ]] || python scripts/make_arithmetic.py --out data

say "megarl train recipes/quickstart.yaml $*"
exec megarl train recipes/quickstart.yaml "$@"
