#!/usr/bin/env bash
# Style, types and tests, in three lanes at once: the end-to-end tests and some slow ones, the fast ones and some slow ones,
# the other slow ones. With arguments, one pytest gets them, e.g. bash scripts/test.sh -n 2 -m "not slow"
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
folder=$(mktemp -d /tmp/t-XXXX) # of all: what libraries leave among the temporary files goes with it
slow=(-m "slow and not nightly")
with_runs=(tests/plan tests/training tests/tracking) # the lanes then take about as long
with_fast=(tests/cluster tests/config tests/environments tests/slurm)
lane() { # $1: its name; the others, up to each --: what one pytest after the other gets
    trap 'exit 130' INT # pytest answers it too; the next one must not begin
    local name=$1 failed=0 arguments=()
    mkdir "$folder/$name"
    for argument in "${@:2}" --; do
        if [[ $argument != -- ]]; then
            arguments+=("$argument")
            continue
        fi
        TMPDIR=$folder/$name python -m pytest -p no:cacheprovider "${arguments[@]}" || failed=$?
        arguments=()
    done
    exit "$failed"
}
set -m # each in a process group of its own, which Ctrl-C here ends as a whole
say "pytest in two lanes in the background, printed at the end:"
say "- tests/end_to_end, then the slow tests of ${with_runs[*]}"
lane runs tests/end_to_end -- "${with_runs[@]}" "${slow[@]}" >"$folder/runs.log" 2>&1 &
lanes=($!)
say "- the fast tests, then the slow ones of ${with_fast[*]}"
lane fast --ignore=tests/end_to_end -m "not slow" -- "${with_fast[@]}" "${slow[@]}" >"$folder/fast.log" 2>&1 &
lanes+=($!)
say "pytest, the other slow tests"
elsewhere=(tests/end_to_end "${with_runs[@]}" "${with_fast[@]}")
lane slow "${elsewhere[@]/#/--ignore=}" "${slow[@]}" &
lanes=($! "${lanes[@]}")
# pytest's own answer to SIGINT ends what its tests have started
trap 'kill -INT -- "${lanes[@]/#/-}" 2>/dev/null || true; wait || true; rm -rf "$folder"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
code=0
wait "${lanes[0]}" || code=$?
say "waiting for the tests in the background"
for process in "${lanes[@]:1}"; do
    wait "$process" || code=$?
done
cat "$folder/runs.log" "$folder/fast.log"
exit "$code"
