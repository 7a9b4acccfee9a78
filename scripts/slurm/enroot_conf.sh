# shellcheck shell=bash
# For `enroot start --conf`, which calls these functions (docs/cluster.md).

# What the container gets of the host's environment, of which enroot hands on nothing by itself. PATH, HOME and
# LD_LIBRARY_PATH stay the image's.

environ() {
    env | grep -E '^(MEGARL|RAY|SLURM|SLURMD|NCCL|GLOO|CUDA|SGLANG|NVTE|HF|OMP|WANDB|MLFLOW)_[A-Z0-9_]+=|^(TMPDIR|PYTHONUNBUFFERED|PYTHONPATH)='
    printf 'MEGARL_DIRECTORY=%s\n' "$PWD"
}

# shellcheck disable=SC2329 # enroot takes its text
# What enroot runs inside, by the image's sh, in place of the image's /etc/rc, which would go to the image's own working
# directory: the command, in the folder that it was called in, because recipes name files from there.
rc() {
    cd "$MEGARL_DIRECTORY" || exit 1
    exec "$@"
}
