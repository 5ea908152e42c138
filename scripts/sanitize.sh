#!/usr/bin/env bash
# Runs the core's tests under a sanitizer: scripts/sanitize.sh asan|tsan|loom [arguments of cargo test, e.g. --test it threads::]
#
# Stable Rust ships the sanitizers' runtimes; RUSTC_BOOTSTRAP=1 makes -Zsanitizer available without a nightly compiler.
#   asan  AddressSanitizer. The standard library needs no rebuilding. Without the runtime: valgrind's memcheck.
#   tsan  ThreadSanitizer. It must see the locks of the standard library, or it reports every Mutex as a race: needs -Zbuild-std,
#         and so the source of the standard library (`rustup component add rust-src`). Without it: the same tests, over and
#         over, without a sanitizer (valgrind's helgrind and drd do not know Rust's locks and report every Mutex too).
#   loom  no sanitizer: the models of the parts that threads share (one single flight, handed out parts, batches read ahead), in
#         every order in which their threads can run, with at most LOOM_MAX_PREEMPTIONS (3) changes of thread that nothing forces.
# Each has a target directory of its own (target/asan, target/tsan, target/loom). Exit status 0: nothing was found; 3: done without the sanitizer.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-}
[ $# -gt 0 ] && shift
# Property tests: a sanitizer is 2 to 20 times slower, so fewer cases; PROPTEST_CASES says otherwise.
export PROPTEST_CASES=${PROPTEST_CASES:-16}
host=$(rustc -vV | sed -n 's/^host: //p')
sysroot=$(rustc --print sysroot)
arguments=("$@")
[ $# -gt 0 ] || arguments=(--tests)

runtime() { compgen -G "$sysroot/lib/rustlib/$host/lib/librustc-*_rt.$1.a" >/dev/null; }

# Instrumented code is not optimised away: --target keeps build scripts and macros out of it.
build() { # directory, sanitizer, further arguments of cargo
    local directory=$1 sanitizer=$2
    shift 2
    RUSTC_BOOTSTRAP=1 RUSTFLAGS="-Zsanitizer=$sanitizer -Cdebuginfo=line-tables-only" \
        cargo test --locked -p actshard-core --target "$host" --target-dir "target/$directory" "$@" "${arguments[@]}"
}

case "$what" in
asan)
    if runtime asan; then
        # zstd, blosc, LZ4 and libdeflate (C) are not instrumented; their memory still lies between guarded blocks. Leaks: the pool
        # and freed outputs live as long as the process.
        ASAN_OPTIONS=${ASAN_OPTIONS:-detect_leaks=0:detect_odr_violation=0:detect_stack_use_after_return=1} build asan address
    elif command -v valgrind >/dev/null; then
        echo "sanitize: no AddressSanitizer runtime in $sysroot; running valgrind's memcheck (slow)" >&2
        CARGO_TARGET_DIR=target/valgrind CARGO_TARGET_$(echo "$host" | tr 'a-z-' 'A-Z_')_RUNNER="valgrind -q --error-exitcode=99" \
            cargo test --locked -p actshard-core --target "$host" "${arguments[@]}"
    else
        echo "sanitize: neither an AddressSanitizer runtime in $sysroot nor valgrind: nothing was run" >&2
        exit 2
    fi
    ;;
tsan)
    [ $# -gt 0 ] || arguments=(--test it threads::)
    if runtime tsan && [ -f "$sysroot/lib/rustlib/src/rust/library/Cargo.lock" ]; then
        TSAN_OPTIONS=${TSAN_OPTIONS:-halt_on_error=1} build tsan thread -Zbuild-std
    else
        echo "sanitize: ThreadSanitizer needs its runtime and the standard library's source in $sysroot" >&2
        echo "sanitize: (rustup component add rust-src); running the stress tests 50 times without it" >&2
        for _ in $(seq 50); do
            cargo test --locked --quiet -p actshard-core "${arguments[@]}" >/dev/null || { echo "sanitize: failed" >&2; exit 1; }
        done
        exit 3
    fi
    ;;
loom)
    RUSTFLAGS="--cfg actshard_loom" LOOM_MAX_PREEMPTIONS=${LOOM_MAX_PREEMPTIONS:-3} \
        cargo test --locked -p actshard-core --lib --target-dir target/loom models
    ;;
*)
    sed -n '2,11s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
