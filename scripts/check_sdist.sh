#!/usr/bin/env bash
# Builds a source distribution without a network, as distributions of Linux do, and runs `actshard demo`: crates and build tools come
# from local caches alone, so a file that the sdist lacks, or a download in a build script, is an error.
# check_sdist.sh BIN SDIST, where BIN has python and maturin
set -euo pipefail
bin=$1 sdist=$2
empty=$(mktemp -d)
trap 'rm -rf "$empty"' EXIT
"$bin/python" -m tarfile -e "$sdist" "$empty"
top=$(echo "$empty"/actshard-*)
cargo fetch --quiet --locked --manifest-path "$top/Cargo.toml"
"$bin/python" -m venv "$empty/venv"
"$empty/venv/bin/pip" install --quiet --disable-pip-version-check "maturin>=1.9.4,<2" $("$bin/python" - "$top" <<'PYTHON'
import sys, tomllib, pathlib
print(*tomllib.loads((pathlib.Path(sys.argv[1]) / "pyproject.toml").read_text())["project"]["dependencies"])
PYTHON
)
cd "$empty"
CARGO_NET_OFFLINE=true ./venv/bin/pip install --quiet --disable-pip-version-check --no-build-isolation --no-index --no-deps "$top"
./venv/bin/actshard demo
