#!/usr/bin/env bash
# Style, types and tests, these in three lanes at once, each of which takes the next part of them when it has ended one.
# With arguments, one pytest gets them, e.g. bash scripts/test.sh -n 2 -m "not slow"
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
provide chromedriver Chromium "the tests of the run page" chromium chromium-driver
python scripts/fetch_trace_processor.py ||
    say "Perfetto's trace processor is missing: the tests that ask it about timelines will be skipped"
if command -v scontrol >/dev/null && ! command -v slurmctld >/dev/null; then
    say "this machine belongs to a Slurm cluster: the tests of Slurm jobs, which start their own, will be skipped"
else
    provide slurmctld Slurm "the tests of Slurm jobs" munge slurm-client slurmctld slurmd
fi
say "ruff check"
ruff check .
ruff format --check --quiet .
types=(pyright --pythonpath "$VENV/bin/python")
if (($#)); then
    say "pyright"
    "${types[@]}"
    say "pytest $*"
    exec python -m pytest "$@"
fi
if [[ $device == cuda ]]; then # the runs of the tests want four GPUs, which the CPU simulates
    say "the tests run on the CPU; bash scripts/gpu_check.sh runs those that the GPUs of this machine allow"
    export MEGARL_DEVICE=cpu
fi
folder=$(mktemp -d /tmp/t-XXXX) # of all: what libraries leave among the temporary files goes with it
tests=(python -m pytest -p no:cacheprovider)
slow=(-m "slow and not nightly")
runs=(tests/end_to_end/test_{ending,run,silent_faults,slurm}.py) # half of the end-to-end tests
plans=(tests/plan tests/training tests/tracking)
processes=(tests/cluster tests/config tests/environments tests/slurm)
engines=(tests/resharding tests/rollout)
elsewhere=(tests/end_to_end "${plans[@]}" "${processes[@]}" "${engines[@]}" tests/parallel)
parts=( # commands, each up to its --; the longest come first
    "${tests[@]}" tests/end_to_end "${runs[@]/#/--ignore=}" --
    "${tests[@]}" "${runs[@]}" --
    "${tests[@]}" --ignore=tests/end_to_end -m "not slow" --
    "${tests[@]}" "${engines[@]}" "${slow[@]}" --
    "${tests[@]}" tests/parallel "${slow[@]}" --
    "${tests[@]}" "${processes[@]}" "${slow[@]}" --
    "${types[@]}" --
    "${tests[@]}" "${plans[@]}" "${slow[@]}" --
    "${tests[@]}" "${elsewhere[@]/#/--ignore=}" "${slow[@]}" --
)
lane() { # one part after the other that no other lane has begun
    trap 'exit 130' INT # pytest answers it too; the next one must not begin
    local failed=0 number=0 command=()
    for word in "${parts[@]}"; do
        if [[ $word != -- ]]; then
            command+=("$word")
            continue
        fi
        number=$((number + 1))
        if mkdir "$folder/$number" 2>/dev/null; then
            TMPDIR=$folder/$number "${command[@]}" || failed=$?
        fi
        command=()
    done
    exit "$failed"
}
set -m # each in a process group of its own, which Ctrl-C here ends as a whole
say "pyright and pytest in three lanes, two of them in the background, printed at the end"
lanes=()
for name in second third; do
    lane >"$folder/$name.log" 2>&1 &
    lanes+=($!)
done
lane &
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
cat "$folder/second.log" "$folder/third.log"
exit "$code"
