# shellcheck shell=bash
# Sourced by run_*.sh, ray_node.sh and slurm/megarl.sbatch: goes to the repository root, finds megarl, and sets what the
# libraries of a GPU cluster read from the environment. All of it are defaults: what the caller has set stays.

set -euo pipefail

unset CDPATH
# shellcheck disable=SC2034
CALLER=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.."
ROOT=$PWD

# What the caller names by a path of the caller's folder means the same here. Recipes and overlays of the repository may be
# named from its root everywhere, and so are the paths in keys.
for name in MEGARL_JOBS MEGARL_LOGS MEGARL_RAY_DIR RAY_AUTH_TOKEN_PATH; do
    [[ -z ${!name:-} || ${!name} == /* ]] || export "$name=$CALLER/${!name}"
done
given=()
for one; do
    [[ $CALLER == "$ROOT" || $one != [^/-]*.y?(a)ml || $one == *=* || ! -f $CALLER/$one ]] || one=$CALLER/$one
    given+=("$one")
done
set -- "${given[@]}"

say() { printf 'megarl: %s\n' "$*"; }
stop() {
    printf 'megarl: %s\n' "$*" >&2
    exit 2
}

# Wait for the end of a background process; sets `code`. A signal interrupts `wait`: its trap has to add to `signals`.
signals=0
# shellcheck disable=SC2034
await_end() {
    local heard=-1
    while ((heard != signals)); do
        heard=$signals
        wait "$1" && code=0 || code=$?
    done
}

if [[ -z ${megarl_is_elsewhere:-} ]]; then
    command -v megarl >/dev/null || PATH=$ROOT/.venv/bin:$PATH
    command -v megarl >/dev/null ||
        stop "megarl is neither on PATH nor in $ROOT/.venv/bin: install it there, or activate its environment"
    PYTHON=$(dirname "$(command -v megarl)")/python # of megarl's environment
fi
[[ -n ${PYTHON:-} && -x $PYTHON ]] || PYTHON=python3

# One for each: 512 processes must not ask the hub for a tokenizer that lies on the disk; a batch job's log says what is,
# not what was a buffer ago; each of a node's processes, two or three a GPU, would take every core; NCCL's own word on why
# a collective failed is one that torch does not repeat.
: "${HF_HUB_OFFLINE:=1}" "${PYTHONUNBUFFERED:=1}" "${OMP_NUM_THREADS:=8}" "${NCCL_DEBUG:=WARN}"
# 4 us x 2^22, 17 s a try: a link that flaps must not end a run of hundreds of GPUs.
: "${NCCL_IB_TIMEOUT:=22}"
# Megatron's overlap wants kernels to start in the order of their launch; SGLang sets its own. Passes in pairs
# (train.megatron.overlap_moe_expert_parallel_comm) want 32.
: "${CUDA_DEVICE_MAX_CONNECTIONS:=1}"
# An fp8 engine compiles a choice of shapes before it starts, and not thousands of them.
: "${SGLANG_JIT_DEEPGEMM_FAST_WARMUP:=1}"
export HF_HUB_OFFLINE PYTHONUNBUFFERED OMP_NUM_THREADS NCCL_DEBUG NCCL_IB_TIMEOUT CUDA_DEVICE_MAX_CONNECTIONS
export SGLANG_JIT_DEEPGEMM_FAST_WARMUP
# Ray keeps what its processes say in files of the node.
if [[ -n ${MEGARL_LOGS:-} ]]; then
    export NCCL_DEBUG_FILE="${NCCL_DEBUG_FILE:-$MEGARL_LOGS/nccl.%h.%p}"
fi

# Where a node has several networks: the one by which nodes know each other. Else NCCL and gloo each guess on their own.
if [[ -n ${MEGARL_INTERFACE:-} ]]; then
    # For NCCL a bare name is a beginning: eth1 takes eth10 too.
    : "${NCCL_SOCKET_IFNAME:==$MEGARL_INTERFACE}" "${GLOO_SOCKET_IFNAME:=$MEGARL_INTERFACE}"
    export NCCL_SOCKET_IFNAME GLOO_SOCKET_IFNAME
fi
