#!/usr/bin/env bash
# Runs the tests of GPU paths that this machine allows: bash scripts/gpu_check.sh [1|2|3]
# At most 480 s a tier, 560 s for tier 1, or $LIMIT_S seconds; the page of results goes to docs/gpu, or to $OUT where that
# is set (docs/gpu/README.md).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 1

python=${PYTHON:-}
if [[ -z $python ]]; then
    python=python3
    [[ -x .venv/bin/python ]] && python=.venv/bin/python
fi
export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 # of what else this Python has

# bash scripts/gpu_check.sh --simulated [ARGUMENTS OF PYTEST] runs TransformerEngine's Python on a simulated GPU. The packages
# of the GPU lock are installed into a folder of their own, or are in $MEGARL_SIMULATED_VENV.
simulated() { # arguments of pytest
    local folder=${MEGARL_SIMULATED_VENV:-$PWD/.venv-simulated}
    if [[ -z ${MEGARL_SIMULATED_VENV:-} || ! -e $folder ]]; then
        MEGARL_DEVICE=cuda MEGARL_VENV=$folder bash -c 'source scripts/setup_env.sh' || exit
    fi
    "$folder/bin/python" -c 'import transformer_engine.pytorch' || {
        echo "megarl: TransformerEngine cannot be used in $folder: name another folder in MEGARL_SIMULATED_VENV," \
            "or none, and the packages of requirements/gpu.txt are installed in $PWD/.venv-simulated" >&2
        exit 2
    }
    unset MEGARL_DEVICE
    exec "$folder/bin/python" -m pytest -p no:cacheprovider -m "" tests/gpu/simulated "$@"
}

if [[ ${1:-} == --simulated ]]; then
    shift
    simulated "$@"
fi

tiers=$("$python" -m tests.gpu.tiers "$@") || exit 2
results=$(mktemp -d)
trap 'rm -rf "$results"' EXIT
status=0
for tier in $tiers; do
    limit_s=480
    [[ $tier != 1 ]] || limit_s=560
    limit_s=${LIMIT_S:-$limit_s}
    echo "tier $tier: at most $limit_s s"
    mapfile -t paths < <("$python" -m tests.gpu.tiers --paths "$tier")
    MEGARL_GPU_RESULTS=$results/$tier.jsonl timeout --kill-after=20 "$limit_s" "$python" -m pytest -q \
        -p no:cacheprovider -p tests.gpu.results -o faulthandler_timeout=200 "${paths[@]}" || status=1
done
"$python" -m tests.gpu.report "$results" "${OUT:-docs/gpu}" || status=1
exit "$status"
