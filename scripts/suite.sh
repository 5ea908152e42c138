#!/usr/bin/env bash
# Runs the Python suite without tests/torture in two processes: most tests use one core. Each process takes the next of ten groups
# of files when it has finished one.
# suite.sh PYTHON [OPTIONS OF PYTEST]
set -euo pipefail
groups=10
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
files=$(find tests -name 'test_*.py' -not -path 'tests/torture/*' | sort)

group() {
    local number=$1 status=0
    shift
    # shellcheck disable=SC2046 -- names of tests have no spaces
    "$@" $(awk -v n="$number" -v of="$groups" 'NR % of == n' <<<"$files") >"$logs/$number" 2>&1 || status=$?
    cat "$logs/$number"
    return "$status"
}

export -f group
export files groups logs
seq 0 $((groups - 1)) | xargs -P 2 -I{} bash -euo pipefail -c 'group "$@"' suite {} "$1" -m pytest "${@:2}"
