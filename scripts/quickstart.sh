#!/usr/bin/env bash
# Everything from a fresh clone to a model that learnt to add: bash scripts/quickstart.sh [a.b=c ...]
# Or to one that learnt to multiply with a calculator: bash scripts/quickstart.sh tools [a.b=c ...]
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

recipe=recipes/quickstart.yaml model=models/tiny-qwen3-moe data=data options=()
if [[ ${1-} == tools ]]; then
    shift
    recipe=recipes/quickstart_tools.yaml model=models/tiny-qwen3-moe-tools data=data/tools options=(--tools)
fi

[[ -f $model/config.json ]] || python scripts/make_tiny_moe.py "${options[@]}" --out "$model"
[[ -f $data/train.jsonl && -f $data/eval.jsonl ]] || python scripts/make_arithmetic.py "${options[@]}" --out "$data"

say "megarl train $recipe $*"
exec megarl train "$recipe" "$@"
