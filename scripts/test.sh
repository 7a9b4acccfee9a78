#!/usr/bin/env bash
# Style, types and tests; arguments go to pytest, e.g. bash scripts/test.sh -m "not slow"
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

# Some tests need programs that pip does not have, and skip without them.
provide() { # $1: program, $2: its name, $3: the tests, then its packages
    local install=(apt-get install -y --no-install-recommends "${@:4}")
    command -v "$1" >/dev/null && return
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        say "installing $2 for $3"
        export DEBIAN_FRONTEND=noninteractive
        "${install[@]}" >/dev/null 2>&1 || { apt-get update && "${install[@]}"; } >/dev/null 2>&1 || true
    fi
    command -v "$1" >/dev/null || say "$2 ($1) is missing: $3 will be skipped"
}

provide bwrap bubblewrap "the tests of the sandbox" bubblewrap
if command -v scontrol >/dev/null && ! command -v slurmctld >/dev/null; then
    say "this machine belongs to a Slurm cluster: the tests of Slurm jobs, which start their own, will be skipped"
else
    provide slurmctld Slurm "the tests of Slurm jobs" munge slurm-client slurmctld slurmd
fi
say "ruff check"
ruff check .
say "pyright"
pyright --pythonpath "$VENV/bin/python"
say "pytest $*"
exec python -m pytest "$@"
