#!/usr/bin/env bash
# Style, types and tests; arguments go to pytest, e.g. bash scripts/test.sh -m "not slow"
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

# The tests of the sandbox for judged programs need bubblewrap, and skip without it.
provide_bubblewrap() {
    command -v bwrap >/dev/null && return
    local install=(apt-get install -y --no-install-recommends bubblewrap)
    if [[ $(id -u) == 0 ]] && command -v apt-get >/dev/null; then
        say "installing bubblewrap for the tests of the sandbox"
        export DEBIAN_FRONTEND=noninteractive
        "${install[@]}" >/dev/null 2>&1 || { apt-get update && "${install[@]}"; } >/dev/null 2>&1 || true
    fi
    command -v bwrap >/dev/null || say "bubblewrap (bwrap) is missing: the tests of the sandbox will be skipped"
}

provide_bubblewrap
say "ruff check"
ruff check .
say "pyright"
pyright --pythonpath "$VENV/bin/python"
say "pytest $*"
exec python -m pytest "$@"
