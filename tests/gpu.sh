#!/usr/bin/env bash
# Checks and measures the CUDA backend on one NVIDIA GPU. The machine with the GPU needs no Rust.
#
#   tests/gpu.sh build                  where Rust is: puts stripped binaries into target/gpu/
#   tests/gpu.sh run OUT 1|2|3|PART..   on the machine with the GPU
#   tests/gpu.sh rehearse OUT [PART..]  those binaries on a stand-in for the GPU, in a bare folder
#
# Call 1: kernels, speed of 1.3B, training. Call 2: compute-sanitizer, calibration and check of the
# 1.3B plan, profiles. Call 3: law, prediction, speed of all cases, PyTorch. A call ends within
# FORETELL_GPU_SECONDS (570 by default). OUT/results.jsonl has a line per item, written at once.
# `tests/gpu/summary.py OUT..` makes a page of them. docs/gpu.md describes the parts.
set -euo pipefail
cd "$(dirname "$0")/.."
programs=target/gpu
# What a session may carry to a lent machine.
most_bytes=$((64 << 20))

build() {
    local target=${CARGO_TARGET_DIR:-target} profile=${FORETELL_GPU_PROFILE:-release} folder tests bytes
    folder=${profile/#dev/debug}
    mkdir -p "$programs"
    cargo build --profile "$profile" --locked --workspace --bin foretell
    tests=$(cargo test --profile "$profile" --locked --workspace --lib --no-run --message-format=json | python3 -c '
import json, sys
found = [json.loads(line) for line in sys.stdin if line.startswith("{")]
print([one["executable"] for one in found if one.get("executable") and one["target"]["name"] == "foretell_kernels"][-1])')
    strip -o "$programs/foretell" "$target/$folder/foretell"
    strip -o "$programs/kernel-tests" "$tests"
    bytes=$({ git ls-files -z; printf '%s\0' "$programs"/*; } | du -cb --files0-from=- | tail -1 | cut -f1)
    echo "tree and binaries: $bytes of $most_bytes bytes"
    [ "$bytes" -le $most_bytes ]
}

# Puts the library folders of PyTorch's packages first, so that Foretell loads the cuBLASLt that
# PyTorch loads.
find_libraries() {
    local folders
    folders=$(python3 -c '
import glob, os, sys
roots = [os.path.join(path, name) for path in sys.path if path for name in ("nvidia", "torch/lib")]
print(":".join(sorted({os.path.dirname(one) for root in roots for one in glob.glob(root + "/**/lib*.so*", recursive=True)})))')
    export LD_LIBRARY_PATH="${folders:+$folders:}${LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}/usr/local/cuda/lib64" PATH="$PATH:/usr/local/cuda/bin"
}

run() {
    find_libraries
    python3 tests/gpu/run.py "$@"
}

# Compiles the stand-ins for the driver, NVRTC and the kernels.
stand_ins() {
    local sources=executor/kernels/src/cuda common=(-std=c++17 -O2 -ffp-contract=off -w -fPIC -shared)
    mkdir -p "$1"
    g++ "${common[@]}" -DSTAND_IN_DRIVER $sources/emulator/driver.cpp -ldl -o "$1/libcuda.so.1"
    g++ "${common[@]}" -DSTAND_IN_NVRTC $sources/emulator/driver.cpp -o "$1/libnvrtc.so.13"
    for precision in 0 1 2; do
        g++ "${common[@]}" -DPRECISION=$precision -I $sources/kernels $sources/emulator/emulator.cpp -o "$1/emulator-$precision.so"
    done
}

# Runs the three calls, or parts, as a lent machine would: only the carried files are there, and an
# environment that has nothing of this machine.
rehearse() {
    local out stand_in=$PWD/target/gpu-stand-in
    mkdir -p "$1"
    out=$(realpath "$1")
    shift
    [ $# -gt 0 ] || set -- 1 2 3
    stand_ins "$stand_in"
    bare=$(mktemp -d)
    trap 'rm -rf "$bare"' EXIT
    { git ls-files -z --cached --others --exclude-standard; printf '%s\0' "$programs"/*; } | tar c --null -T - | tar x -C "$bare"
    for part in "$@"; do
        env -i PATH="$PWD/tests/gpu/stand_in:/usr/bin:/bin" HOME="$bare" LD_LIBRARY_PATH="$stand_in" FORETELL_GPU_REHEARSAL=1 \
            FORETELL_GPU_SECONDS="${FORETELL_GPU_SECONDS:-570}" ${FORETELL_STAND_IN_FAULT:+FORETELL_STAND_IN_FAULT="$FORETELL_STAND_IN_FAULT"} \
            "$bare/tests/gpu.sh" run "$out" "$part" || echo "call $part: items failed"
    done
}

case "${1:-}" in
build) build ;;
run) shift; run "${@:?the folder for results}" ;;
rehearse) shift; rehearse "${@:?the folder for results}" ;;
*) sed -n '2,13p' "$0"; exit 2 ;;
esac
