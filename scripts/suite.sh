#!/usr/bin/env bash
# Runs the Python suite in two processes, because most tests use one core. Each process takes the next group of files when it has
# finished one; first those of tests/torture, which take longest.
# SUITE_PARTS: number of groups of the other files. A group without a chosen test is fine.
# suite.sh PYTHON [OPTIONS OF PYTEST]
set -euo pipefail
parts=${SUITE_PARTS:-14}
fresh="tests/torture/test_store_machine.py tests/torture/test_stream_machine.py" # begin in a fresh process: they count descriptors
groups=$(mktemp -d)
trap 'rm -rf "$groups"' EXIT

find tests -name 'test_*.py' | sort >"$groups/files"
tr ' ' '\n' <<<"$fresh" >"$groups/01"
grep '^tests/torture/' "$groups/files" | grep -vxF -f "$groups/01" >"$groups/00"
for ((part = 0; part < parts; part++)); do
    grep -v '^tests/torture/' "$groups/files" | awk -v n="$part" -v of="$parts" 'NR % of == n' >"$groups/$((part + 10))"
done

run() {
    local group=$1 status=0
    shift
    # shellcheck disable=SC2046 -- names of tests have no spaces
    "$@" $(cat "$group") >"$group.log" 2>&1 || status=$?
    cat "$group.log"
    [ "$status" -eq 5 ] || return "$status" # 5: no tests
}

export -f run
find "$groups" -name '[0-9][0-9]' | sort | xargs -P 2 -I{} bash -euo pipefail -c 'run "$@"' suite {} "$1" -m pytest "${@:2}"
