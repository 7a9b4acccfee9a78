# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh: goes to the repository root and makes, or reuses, .venv there.
# MEGARL_TORCH_INDEX may name the package index that offers torch's CPU build, where PyTorch's own is out of reach.

set -euo pipefail

# A caller's Python, pip target or proxy to another cluster must not leak into ours.
unset CDPATH PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER PIP_CONSTRAINT PIP_DRY_RUN PIP_REQUIRE_VIRTUALENV RAY_ADDRESS
for name in "${!PYTHON@}"; do unset "$name"; done
export PYTHONNOUSERSITE=1 HF_HUB_OFFLINE=1

cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$PWD
VENV=$ROOT/.venv
STAMP=$VENV/megarl.stamp
NEEDED_GIB=8
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf 'megarl: %s\n' "$*"; }
stop() {
    printf 'megarl: %s\n' "$*" >&2
    exit 2
}

# The stamp names everything the environment was made from: a moved repository or a new lock makes a new one.
wanted_stamp() {
    printf '%s\n' "$ROOT"
    cat requirements/cpu.txt setup.py pyproject.toml | sha256sum
}

check_machine() {
    command -v python3.11 >/dev/null || stop "python3.11 is missing: install Python 3.11 and run this again"
    python3.11 -c 'import ensurepip, venv' 2>/dev/null ||
        stop "python3.11 cannot make environments: install its venv package (python3.11-venv) and run this again"
    local free_kib
    free_kib=$(df -Pk "$ROOT" | awk 'NR == 2 { print $4 }')
    ((free_kib >= NEEDED_GIB * 1024 * 1024)) ||
        stop "$((free_kib / 1024 / 1024)) GiB free on the disk of $ROOT, $NEEDED_GIB GiB are needed: make room and run this again"
}

# Where pip finds no CPU build of torch it takes the CUDA build, which does not even import without CUDA's packages.
install_cpu_torch() {
    local index=${MEGARL_TORCH_INDEX:-$TORCH_CPU_INDEX}
    say "pip chose a torch that needs CUDA: taking the CPU build from $index"
    "$VENV/bin/python" -m pip install -qq --no-deps --no-compile --force-reinstall --index-url "$index" \
        "$(grep '^torch==' requirements/cpu.txt)" || true
    "$VENV/bin/python" -c 'import torch' 2>/dev/null ||
        stop "no CPU build of torch from $index: set MEGARL_TORCH_INDEX to an index that has one and run this again"
}

install_environment() {
    say "making $VENV (once; a minute or two, 3 GiB)"
    python3.11 -m venv --clear "$VENV"
    say "installing $(grep -c == requirements/cpu.txt) pinned packages from requirements/cpu.txt"
    "$VENV/bin/python" -m pip install -qq --no-deps --no-compile -r requirements/cpu.txt
    "$VENV/bin/python" -c 'import torch' 2>/dev/null || install_cpu_torch
    say "installing megarl from $ROOT"
    "$VENV/bin/python" -m pip install -qq --no-deps --no-build-isolation -e .
    wanted_stamp >"$STAMP"
}

exec 9>"$ROOT/.venv.lock" # two scripts at once: the second waits for the first one's installation
flock 9
if [[ -f $STAMP && "$(cat "$STAMP")" == "$(wanted_stamp)" ]]; then
    say "using $VENV"
else
    check_machine
    install_environment
fi
exec 9>&-
export PATH="$VENV/bin:$PATH" VIRTUAL_ENV="$VENV"
