# shellcheck shell=bash
# For `enroot start --conf`: what the job's container gets of the host's environment, of which enroot hands on nothing by
# itself. PATH, HOME and LD_LIBRARY_PATH stay the image's (docs/first_step.md).

environ() {
    env | grep -E '^(MEGARL|RAY|SLURM|SLURMD|NCCL|GLOO|CUDA|SGLANG|NVTE|HF|OMP|WANDB|MLFLOW)_[A-Z0-9_]+=|^(TMPDIR|PYTHONUNBUFFERED|PYTHONPATH)='
}
