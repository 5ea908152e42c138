#!/usr/bin/env bash
# Lets libFuzzer look for inputs that make a fuzz target fail. One program is built, on stable Rust, with the coverage
# instrumentation that cargo-fuzz would ask for. Needs a C++ compiler (libFuzzer is C++) and nothing else.
# FUZZ_RUNS, FUZZ_SECONDS: how long each target; FUZZ_MAX_LEN: bytes of the longest input; FUZZ_ASAN=1: with AddressSanitizer;
# FUZZ_PROFILE: smoke compiles faster, release finds more in a long run; FUZZ_JOBS: targets at a time; FUZZ_TARGETS: names of some;
# FUZZ_CORPUS: a folder where the inputs found stay, and from which the next run goes on.
set -euo pipefail
cd "$(dirname "$0")"

host=$(rustc -vV | sed -n 's/^host: //p')
# A --target, even the host's own, keeps these flags away from build scripts, which are not linked with libFuzzer.
export RUSTFLAGS="--cfg fuzzing -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 \
-Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-pc-table \
-Cllvm-args=-sanitizer-coverage-trace-compares -Cdebug-assertions -Coverflow-checks"
built=explore/target
if [ -n "${FUZZ_ASAN:-}" ]; then
    # AddressSanitizer's runtime comes with the stable toolchain; only the flag asks for nightly.
    export RUSTC_BOOTSTRAP=1 RUSTFLAGS="$RUSTFLAGS -Zsanitizer=address" ASAN_OPTIONS="detect_leaks=0:detect_odr_violation=0:${ASAN_OPTIONS:-}"
    export FUZZ_RSS="${FUZZ_RSS:-4096}"
    built=explore/target/asan
fi
profile=${FUZZ_PROFILE:-smoke}
cargo build --quiet --locked --manifest-path explore/Cargo.toml --profile "$profile" --target "$host" --target-dir "$built"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
corpus=${FUZZ_CORPUS:-$work}
# The allocator that counts is the targets' own; libFuzzer's limits are for what it does not see, and for endless loops.
run() {
    target=$1
    log=$work/$target.log
    mkdir -p "$corpus/$target"
    folders=("$corpus/$target" "seeds/$target")
    [ ! -d "failed/$target" ] || folders+=("failed/$target")
    if FUZZ_TARGET=$target "$built/$host/$profile/explore" -runs="${FUZZ_RUNS:-300000}" -max_total_time="${FUZZ_SECONDS:-10}" \
        -max_len="${FUZZ_MAX_LEN:-1048576}" -timeout=60 -rss_limit_mb="${FUZZ_RSS:-1024}" -artifact_prefix="$corpus/failed-$target-" \
        "${folders[@]}" >"$log" 2>&1 &&
        done=$(grep -E 'Done [0-9]+ runs' "$log"); then
        echo "fuzz $target: $done"
        return
    fi
    cat "$log"
    echo "fuzz $target: FAILED, input in $corpus; a copy in rust/fuzz/failed/$target makes cargo test run it"
    return 1
}

export -f run
export built host profile corpus work
targets=${FUZZ_TARGETS:-$(ls seeds)}
[ -n "${targets//[[:space:]]/}" ] || { echo "FUZZ_TARGETS: expected names of targets, found none"; exit 1; }
# shellcheck disable=SC2086 -- one word per target is meant
if ! printf '%s\n' $targets | xargs -P "${FUZZ_JOBS:-$(getconf _NPROCESSORS_ONLN)}" -I{} bash -euo pipefail -c 'run {}'; then
    # The input that failed is in there, and libFuzzer prints only small ones.
    trap - EXIT
    exit 1
fi
