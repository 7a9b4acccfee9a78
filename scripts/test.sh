#!/usr/bin/env bash
# Style, types and tests: the end-to-end tests, the fast ones and some slow ones in parallel to the other slow ones. With
# arguments, one pytest gets them, e.g. bash scripts/test.sh -n 2 -m "not slow"
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
ruff format --check --quiet .
say "pyright"
pyright --pythonpath "$VENV/bin/python"
if (($#)); then
    say "pytest $*"
    exec python -m pytest "$@"
fi
if [[ $device == cuda ]]; then # the runs of the tests want four GPUs, which the CPU simulates
    say "the tests run on the CPU; bash scripts/gpu_check.sh runs those that the GPUs of this machine allow"
    export MEGARL_DEVICE=cpu
fi
folder=$(mktemp -d /tmp/t-XXXX) # of both: what libraries leave among the temporary files goes with it
mkdir "$folder/a" "$folder/b"
set -m # each in a process group of its own, which Ctrl-C here ends as a whole
beside=(tests/plan tests/training tests/tracking) # their slow tests: both halves then take about as long
say "pytest tests/end_to_end, the fast tests, then the slow ones of ${beside[*]}, in the background, printed at the end"
{
    trap 'exit 130' INT # pytest answers it too; the next one must not begin
    failed=0
    TMPDIR=$folder/a python -m pytest -p no:cacheprovider tests/end_to_end || failed=$?
    TMPDIR=$folder/a python -m pytest -p no:cacheprovider --ignore=tests/end_to_end -m "not slow" || failed=$?
    TMPDIR=$folder/a python -m pytest -p no:cacheprovider "${beside[@]}" -m "slow and not nightly" || failed=$?
    exit "$failed"
} >"$folder/runs.log" 2>&1 &
runs=$!
say "pytest, the other slow tests"
TMPDIR=$folder/b python -m pytest --ignore=tests/end_to_end "${beside[@]/#/--ignore=}" -m "slow and not nightly" &
others=$!
# pytest's own answer to SIGINT ends what its tests have started
trap 'kill -INT -- "-$runs" "-$others" 2>/dev/null || true; wait || true; rm -rf "$folder"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
code=0
wait "$others" || code=$?
say "waiting for the tests in the background"
wait "$runs" || code=$?
cat "$folder/runs.log"
exit "$code"
