#!/usr/bin/env bash
# Checks a wheel: its platform tag, no path of the build machine in it, and `actshard demo` in a bare environment.
# check_wheel.sh BIN WHEEL, where BIN has python and, on Linux, auditwheel
set -euo pipefail
bin=$1 wheel=$2
empty=$(mktemp -d)
trap 'rm -rf "$empty"' EXIT
if [ "$(uname)" = Linux ]; then
    "$bin/auditwheel" show "$wheel"
    case $wheel in
    *manylinux*) ;;
    *) echo "$wheel: expected a manylinux tag; build in a manylinux container, or with COMPATIBILITY=linux for this machine only" >&2
       [ "${COMPATIBILITY:-pypi}" = linux ] || exit 1 ;;
    esac
fi
"$bin/python" - "$wheel" "$HOME" <<'PYTHON'
import sys, zipfile
wheel, home = sys.argv[1:]
with zipfile.ZipFile(wheel) as files:
    for name in files.namelist():
        held = files.read(name)
        if home.encode() + b"/" in held:
            place = held.index(home.encode() + b"/")
            sys.exit(f"{wheel}: {name}: expected no path of this machine, found {held[place:place + 60]!r}")
PYTHON
"$bin/python" -m venv "$empty/venv"
"$empty/venv/bin/pip" install --quiet --disable-pip-version-check "$wheel"
cd "$empty"  # where no source tree could be imported
./venv/bin/actshard demo
./venv/bin/python -c 'import actshard; info = actshard.build_info(); assert info["profile"] == "release", info; print(info)'
