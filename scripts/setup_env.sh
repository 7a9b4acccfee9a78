# shellcheck shell=bash
# Sourced by quickstart.sh and test.sh: goes to the repository root and makes, or reuses, .venv there: from
# requirements/gpu.txt where nvidia-smi lists GPUs, else from cpu.txt; MEGARL_DEVICE (cpu or cuda) says otherwise.
# MEGARL_TORCH_INDEX may name the package index that offers torch's CPU build, where PyTorch's own is out of reach.

set -euo pipefail

# A caller's Python, pip target or proxy to another cluster must not leak into ours.
unset CDPATH PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER PIP_CONSTRAINT PIP_DRY_RUN PIP_REQUIRE_VIRTUALENV RAY_ADDRESS
for name in "${!PYTHON@}"; do unset "$name"; done
export PYTHONNOUSERSITE=1 HF_HUB_OFFLINE=1

cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$PWD
VENV=${MEGARL_VENV:-$ROOT/.venv} # gpu_check.sh --simulated has one of its own
STAMP=$VENV/megarl.stamp
TORCH_CPU_INDEX=https://download.pytorch.org/whl/cpu

say() { printf 'megarl: %s\n' "$*"; }
stop() {
    printf 'megarl: %s\n' "$*" >&2
    exit 2
}

# Sets device, lock, needed_gib and effort.
choose_lock() {
    local num_gpus
    device=${MEGARL_DEVICE:-}
    if [[ -z $device ]]; then
        num_gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ') || true
        device=cpu
        ((num_gpus == 0)) || device=cuda
    fi
    case $device in
        cpu) lock=requirements/cpu.txt needed_gib=8 effort='a minute or two, 3 GiB' ;;
        cuda) lock=requirements/gpu.txt needed_gib=40 effort='TransformerEngine is compiled, which takes a while' ;;
        *) stop "MEGARL_DEVICE is $device: write cpu or cuda, or leave it out" ;;
    esac
}

# The stamp names everything the environment was made from: a new lock makes a new one, and check_owner stops where the
# repository was moved.
wanted_stamp() {
    printf '%s\n' "$ROOT"
    cat "$lock" setup.py pyproject.toml | sha256sum
}

# Sets python: 3.11 where both are there. A name on PATH may still not run, as those of pyenv.
choose_python() {
    local name found=''
    for name in python3.11 python3.12; do
        "$name" -c '' 2>/dev/null || continue
        : "${found:=$name}"
        if "$name" -c 'import ensurepip, venv' 2>/dev/null; then
            python=$name
            return
        fi
    done
    [[ -n $found ]] || stop "python3.11 and python3.12 are missing: install Python 3.11 or 3.12 and run this again"
    stop "$found cannot make environments: install its venv package ($found-venv) and run this again"
}

# An installation empties $VENV first. That must be a folder which this script has made for this repository: a link leads
# to the environment of another clone, and a folder without our stamp holds somebody's own packages.
check_owner() {
    local owner='' again="and run this again"
    [[ ! -L $VENV ]] ||
        stop "$VENV is a link to $(readlink "$VENV"), and an installation would empty that: remove the link (rm $VENV) $again"
    [[ -e $VENV ]] || return 0
    # A folder for it on another disk has nothing in it, no hidden file either.
    [[ ! -d $VENV || -n $(shopt -s dotglob nullglob && printf '%s' "$VENV"/*) ]] || return 0
    if [[ -f $STAMP ]]; then read -r owner <"$STAMP" || true; fi
    [[ $owner == "$ROOT" ]] ||
        stop "$VENV was made by ${owner:-another program}, and an installation would empty it: remove it (rm -r $VENV) $again"
}

check_disk() {
    local free_kib
    free_kib=$(df -Pk "$ROOT" | awk 'NR == 2 { print $4 }')
    ((free_kib >= needed_gib * 1024 * 1024)) ||
        stop "$((free_kib / 1024 / 1024)) GiB free on the disk of $ROOT, $needed_gib GiB are needed: make room and run this again"
}

pip_install() {
    "$VENV/bin/python" -m pip install -qq --no-deps --no-compile "$@"
}

# PyPI's torch for x86-64 is the CUDA build: half a gigabyte that does not even import without CUDA's packages. The CPU
# build is asked for by its whole version, which no CUDA build has: pip then looks in every index it knows, and for no other.
install_cpu_torch() {
    local error report default=() index=${MEGARL_TORCH_INDEX:-$TORCH_CPU_INDEX}
    [[ -z ${MEGARL_TORCH_INDEX-} ]] || default=(--index-url "$index")
    if error=$(pip_install --retries 1 --timeout 15 --index-url "$index" "$pin+cpu" 2>&1); then return; fi
    say "no ${pin/==/ }+cpu from $index (${error##*$'\n'}): looking for another build"
    # What a build needs is known before it is fetched, and tells a CUDA build.
    if report=$(pip_install "${default[@]}" --dry-run --ignore-installed --report - "$pin" 2>/dev/null) &&
        [[ $report != *nvidia-* ]]; then
        pip_install "${default[@]}" "$pin"
    else
        stop "pip finds no build of torch that runs without CUDA: fetch $(cpu_wheel "${pin#*==}") from" \
            "$TORCH_CPU_INDEX/torch/ and run this again with PIP_FIND_LINKS=FOLDER, where you have put it," \
            "or with MEGARL_TORCH_INDEX=URL of an index that has it"
    fi
}

cpu_wheel() { # $1: version
    local tag=${python/python3./cp3}
    printf 'torch-%s+cpu-%s-%s-manylinux_2_28_x86_64.whl' "$1" "$tag" "$tag"
}

# A pin without a local version takes any build, and a CPU build would train over gloo without a word.
check_cuda_torch() {
    local report
    report=$(pip_install --dry-run --ignore-installed --report - "$pin") ||
        stop "pip finds no ${pin/==/ }: name a package index that has PyPI's files (PIP_INDEX_URL) and run this again"
    [[ $report == *nvidia-* ]] ||
        stop "pip would install torch's CPU build on a machine with GPUs, from an index of its settings (pip config list):" \
            "leave that index out and run this again, or set MEGARL_DEVICE=cpu to use no GPU"
}

# TransformerEngine's torch part is compiled against the torch that is installed, with the toolkit's headers. torch
# compiles with the nvcc of CUDA_HOME, so the nvcc that is checked here decides CUDA_HOME.
check_toolkit() {
    local nvcc
    nvcc=$(command -v nvcc) || true
    [[ ! -x ${CUDA_HOME-}/bin/nvcc ]] || nvcc=$CUDA_HOME/bin/nvcc
    [[ -n $nvcc && $("$nvcc" --version 2>/dev/null) == *"release 13."* ]] ||
        stop "no CUDA toolkit 13 (nvcc), with which TransformerEngine is compiled: install one, set CUDA_HOME and run this" \
            "again (docs/install.md), or set MEGARL_DEVICE=cpu to use no GPU"
    CUDA_HOME=$(toolkit_of "$nvcc")
    export CUDA_HOME
}

# The folder that holds bin/nvcc. nvcc may be a link, or a script of the machine that calls the real one: that one says
# the folder in which it was called.
toolkit_of() { # $1: nvcc
    local bin real
    bin=$("$1" --dryrun -x cu /dev/null 2>&1 | awk -F_HERE_= 'NF == 2 { print $2 }')
    real=$(readlink -f "${bin:+$bin/nvcc}") || real=$(readlink -f "$1")
    printf '%s' "${real%/bin/nvcc}"
}

compile_transformer_engine() {
    local headers
    say "compiling TransformerEngine for ${pin/==/ }"
    headers=$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/nvidia
    # Its setup would otherwise look for a wheel on GitHub that nothing pins. torch looks for the lock's ninja on PATH, and
    # compiles one file after the other without it.
    PATH=$VENV/bin:$PATH CPLUS_INCLUDE_PATH=$headers/cudnn/include:$headers/nccl/include NVTE_PYTORCH_FORCE_BUILD=TRUE \
        pip_install --no-build-isolation "$(grep -o '^transformer-engine-torch==[^ ]*' "$lock")"
}

# pip compiles on one core only. Without bytecode each process of a run would compile what it imports, seconds of its start:
# for ever where PYTHONDONTWRITEBYTECODE is set, as in many images. Files for other Pythons do not compile, and none needs them.
compile_bytecode() {
    say "compiling the packages to bytecode"
    "$VENV/bin/python" -m compileall -q -j 0 "$VENV/lib" megarl >/dev/null || true
}

install_environment() {
    local pin
    pin=$(grep -o '^torch==[^ ]*' "$lock")
    [[ $device == cpu ]] || check_toolkit
    say "making $VENV with $python (once; $effort)"
    "$python" -m venv --clear "$VENV"
    printf '%s\n' "$ROOT" >"$STAMP" # ours also where the installation is interrupted
    [[ $device == cpu ]] || check_cuda_torch
    say "installing $(grep -c == "$lock") pinned packages from $lock"
    if [[ $device == cpu ]]; then
        install_cpu_torch
        pip_install -r "$lock"
    else
        pip_install -r <(grep -v '^transformer-engine-torch==' "$lock")
        compile_transformer_engine
    fi
    say "installing megarl from $ROOT"
    pip_install --no-build-isolation -e .
    compile_bytecode
    wanted_stamp >"$STAMP"
}

choose_lock
exec 9>"$ROOT/.venv.lock" # two scripts at once: the second waits for the first one's installation
flock 9
if [[ -f $STAMP && "$(cat "$STAMP")" == "$(wanted_stamp)" ]]; then
    say "using $VENV"
else
    check_owner
    choose_python
    check_disk
    install_environment
fi
exec 9>&-
export PATH="$VENV/bin:$PATH" VIRTUAL_ENV="$VENV"
