#!/usr/bin/env bash
# Runs the Python suite without tests/torture in two processes, one half of the files each: most tests use one core.
# halves.sh PYTHON [OPTIONS OF PYTEST]
set -euo pipefail
python=$1
shift
log=$(mktemp)
trap 'rm -f "$log"' EXIT
half() { find tests -name 'test_*.py' -not -path 'tests/torture/*' | sort | awk "NR % 2 == $1"; }
# shellcheck disable=SC2046 -- names of tests have no spaces
"$python" -m pytest "$@" $(half 0) >"$log" 2>&1 &
other=$!
status=0
# shellcheck disable=SC2046 -- one word per file is meant
"$python" -m pytest "$@" $(half 1) || status=$?
wait "$other" || status=$?
cat "$log"
exit "$status"
