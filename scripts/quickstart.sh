#!/usr/bin/env bash
# Everything from a fresh clone to a model that learnt to add: bash scripts/quickstart.sh [a.b=c ...]
# Or to one that learnt to multiply with a calculator, and then the same without the calculator:
# bash scripts/quickstart.sh tools [a.b=c ...]
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

recipe=recipes/quickstart.yaml model=models/tiny-qwen3-moe data=data options=() with_tools=
if [[ ${1-} == tools ]]; then
    shift
    recipe=recipes/quickstart_tools.yaml model=models/tiny-qwen3-moe-tools data=data/tools options=(--tools) with_tools=yes
fi

[[ -f $model/config.json ]] || python scripts/make_tiny_moe.py "${options[@]}" --out "$model"
[[ -f $data/train.jsonl && -f $data/eval.jsonl ]] || python scripts/make_arithmetic.py "${options[@]}" --out "$data"

say "megarl train $recipe $*"
[[ $with_tools ]] || exec megarl train "$recipe" "$@"

printf -v began '%(%s)T' -1
megarl train "$recipe" "$@"
# The warm start then learns the answers alone, in as many steps.
without=("$@" episode=null data.messages=null run.name=quickstart-without-tool)
say "megarl train $recipe ${without[*]}"
megarl train "$recipe" "${without[@]}"
python scripts/show_accuracies.py "held-out products with the tool" "$began" "$recipe" "$@"
python scripts/show_accuracies.py "held-out products without it" "$began" "$recipe" "${without[@]}"
