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

# The recipes are for four simulated GPUs. On real ones they get as many slots as there are cards (1, 2, 4 or 8), and the
# data type that TransformerEngine's attention takes.
fit_to_gpus() { # sets fitted
    local num_gpus size=1
    num_gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ') || true
    if [[ -n ${CUDA_VISIBLE_DEVICES-} ]]; then
        local visible
        IFS=, read -ra visible <<<"$CUDA_VISIBLE_DEVICES"
        ((${#visible[@]} >= num_gpus)) || num_gpus=${#visible[@]}
    fi
    ((num_gpus > 0)) || stop "MEGARL_DEVICE is cuda, but nvidia-smi lists no GPU here: leave it out, or run this where GPUs are"
    ((num_gpus < 2)) || size=2
    fitted=("model.dtype=bfloat16" "train.tp=$size" "train.ep=$size" "rollout.engine.tp=$size")
    case $num_gpus in
        1 | 2 | 3) fitted+=("train.pp=1" "placement.gpus=$size") ;;
        4 | 5 | 6 | 7) ;;
        *) fitted+=("placement.gpus=8" "rollout.engine.count=4") ;;
    esac
    say "${num_gpus} GPUs here: ${fitted[*]}"
}

fitted=()
[[ $device == cpu ]] || fit_to_gpus
set -- "${fitted[@]}" "$@" # the caller's keys come last, and hold

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
