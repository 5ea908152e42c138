#!/usr/bin/env bash
# Builds the fuzz targets on stable Rust, with the coverage instrumentation that cargo-fuzz would ask for, and runs each
# for a short while. Needs a C++ compiler (libFuzzer is C++) and nothing else; `cargo fuzz` on nightly adds sanitizers.
set -euo pipefail
cd "$(dirname "$0")"

host=$(rustc -vV | sed -n 's/^host: //p')
# A --target, even the host's own, keeps these flags away from build scripts, which are not linked with libFuzzer.
export RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 -Cdebug-assertions -Coverflow-checks"
cargo build --quiet --locked --release --target "$host"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
for source in fuzz_targets/*.rs; do
    target=$(basename "$source" .rs)
    mkdir -p "$work/$target" "seeds/$target"
    if ! "target/$host/release/$target" -runs="${FUZZ_RUNS:-300000}" -max_total_time="${FUZZ_SECONDS:-20}" -max_len=4096 \
        -rss_limit_mb=1024 -artifact_prefix="$work/" "$work/$target" "seeds/$target" >"$work/log" 2>&1; then
        # The input that failed is in there, and libFuzzer prints only small ones.
        trap - EXIT
        cat "$work/log"
        echo "fuzz $target: FAILED, input in $work"
        exit 1
    fi
    echo "fuzz $target: $(grep -E 'Done [0-9]+ runs' "$work/log" || tail -1 "$work/log")"
done
