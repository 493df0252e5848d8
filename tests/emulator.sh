#!/usr/bin/env bash
# Runs the tests of CUDA kernels in the emulator with an address sanitizer: an access outside an
# operand ends the test. Needs g++ and its libasan. CI runs the same tests without it.
#
#   tests/emulator.sh [FILTER..]    `cuda` by default
set -euo pipefail
cd "$(dirname "$0")/.."
tests=$(cargo test --locked --workspace --lib --no-run --message-format=json | python3 -c '
import json, sys
found = [json.loads(line) for line in sys.stdin if line.startswith("{")]
print([one["executable"] for one in found if one.get("executable") and one["target"]["name"] == "foretell_kernels"][-1])')
[ $# -gt 0 ] || set -- cuda
cd executor/kernels
LD_PRELOAD=$(g++ -print-file-name=libasan.so) ASAN_OPTIONS=detect_leaks=0 FORETELL_EMULATOR_ADDRESS=1 "$tests" "$@"
