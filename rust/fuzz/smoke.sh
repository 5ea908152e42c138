#!/usr/bin/env bash
# Builds the fuzz targets on stable Rust, with the coverage instrumentation that cargo-fuzz would ask for, and runs each
# for a short while. Needs a C++ compiler (libFuzzer is C++) and nothing else.
# FUZZ_RUNS, FUZZ_SECONDS: how long each; FUZZ_MAX_LEN: bytes of the longest input; FUZZ_ASAN=1: with AddressSanitizer;
# FUZZ_TARGETS: names of some; FUZZ_CORPUS: a folder where the inputs found stay, and from which the next run goes on.
set -euo pipefail
cd "$(dirname "$0")"

host=$(rustc -vV | sed -n 's/^host: //p')
# A --target, even the host's own, keeps these flags away from build scripts, which are not linked with libFuzzer.
export RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares -Ccodegen-units=1 -Cdebug-assertions -Coverflow-checks"
built=target
if [ -n "${FUZZ_ASAN:-}" ]; then
    # AddressSanitizer's runtime comes with the stable toolchain; only the flag asks for nightly.
    export RUSTC_BOOTSTRAP=1 RUSTFLAGS="$RUSTFLAGS -Zsanitizer=address" ASAN_OPTIONS="detect_leaks=0:detect_odr_violation=0:${ASAN_OPTIONS:-}"
    export FUZZ_RSS="${FUZZ_RSS:-4096}"
    built=target/asan
fi
cargo build --quiet --locked --release --target "$host" --target-dir "$built"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
corpus=${FUZZ_CORPUS:-$work}
for source in fuzz_targets/*.rs; do
    target=$(basename "$source" .rs)
    case " ${FUZZ_TARGETS:-$target} " in *" $target "*) ;; *) continue ;; esac
    mkdir -p "$corpus/$target" "seeds/$target"
    case $target in
    token_array | token_frame | token_lz4 | deflate) most=65536 ;; # whole shards, frames and blocks of many numbers
    *) most=4096 ;;
    esac
    most=${FUZZ_MAX_LEN:-$most}
    if ! "$built/$host/release/$target" -runs="${FUZZ_RUNS:-300000}" -max_total_time="${FUZZ_SECONDS:-10}" -max_len="$most" \
        -rss_limit_mb="${FUZZ_RSS:-1024}" -artifact_prefix="$work/" "$corpus/$target" "seeds/$target" >"$work/log" 2>&1; then
        # The input that failed is in there, and libFuzzer prints only small ones.
        trap - EXIT
        cat "$work/log"
        echo "fuzz $target: FAILED, input in $work"
        exit 1
    fi
    echo "fuzz $target: $(grep -E 'Done [0-9]+ runs' "$work/log" || tail -1 "$work/log")"
done
