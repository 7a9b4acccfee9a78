#!/usr/bin/env bash
# Style, types and tests; arguments go to pytest, e.g. bash scripts/test.sh -m "not slow"
source "$(dirname "${BASH_SOURCE[0]}")/setup_env.sh"

say "ruff check"
ruff check .
say "pyright"
pyright --pythonpath "$VENV/bin/python"
say "pytest $*"
exec python -m pytest "$@"
