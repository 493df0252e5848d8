#!/usr/bin/env bash
# Checks and measures the CUDA backend on one NVIDIA GPU. The machine with the GPU needs no Rust.
#
#   tests/gpu.sh build             on a machine with Rust: puts stripped binaries into target/gpu/
#   tests/gpu.sh run OUT [PART..]  on the machine with the GPU
#
# Parts: kernels, cudnn, law, train, speed (or speed:CASE), prediction, sanitize. The default is
# kernels, cudnn, law and train. A run ends after FORETELL_GPU_SECONDS (570 by default) and lists
# what there was no time for. OUT gets results.md and logs.tar.gz after each part and each long
# case, so a killed run keeps its results.
#
# It needs NVRTC, cuBLASLt and cuDNN, which PyTorch's packages contain, and PyTorch for the
# comparison; `sanitize` needs compute-sanitizer. docs/gpu.md describes the parts.
set -uo pipefail
cd "$(dirname "$0")/.."
programs=target/gpu
deadline=$((SECONDS + ${FORETELL_GPU_SECONDS:-570}))

# at_most SECONDS COMMAND..: runs a command for at most SECONDS, and until the deadline. Returns
# 125, with a note, if no time is left.
at_most() {
    local seconds=$1 left=$((deadline - SECONDS))
    shift
    if [ $left -lt 5 ]; then
        echo "no time was left for: $*" | tee -a "$results/unrun.txt" >&2
        return 125
    fi
    timeout -k 5 "$((left < seconds ? left : seconds))" "$@"
}

build() {
    set -e
    local target=${CARGO_TARGET_DIR:-target}
    mkdir -p "$programs"
    cargo build --release --locked -p foretell
    cp "$target/release/foretell" "$programs/foretell"
    local tests
    tests=$(cargo test --release --locked -p foretell-executor --lib --no-run --message-format=json | python3 -c '
import json, sys
found = [json.loads(line) for line in sys.stdin if line.startswith("{")]
print([one["executable"] for one in found if one.get("executable") and one.get("profile", {}).get("test")][-1])')
    cp "$tests" "$programs/executor-tests"
    strip "$programs/foretell" "$programs/executor-tests"
    ls -l "$programs"
}

# Adds the library folders of PyTorch's packages to the search path.
find_libraries() {
    local folders
    folders=$(python3 -c '
import glob, os, sys
roots = [os.path.join(path, "nvidia") for path in sys.path if path]
print(":".join(sorted({os.path.dirname(one) for root in roots for one in glob.glob(root + "/**/lib*.so*", recursive=True)})))')
    export LD_LIBRARY_PATH="$folders:/usr/local/cuda/lib64:${LD_LIBRARY_PATH:-}" PATH="$PATH:/usr/local/cuda/bin"
}

# topology RANKS: prints a topology of one GPU that RANKS ranks share.
topology() {
    echo "{name: one-gpu, devices: {h200: {base: h200-sxm-141g}}, nodes: [{name: here, devices: {kind: h200, count: $1}, link: nvswitch-450GB/s}]}"
}

# plan NAME MODEL BATCH PRECISION LAYOUT [FURTHER]: writes a plan file.
plan() {
    cat >"$work/$1.yaml" <<PLAN
model: $2
topology: $(topology "${ranks:-1}")
layout: $5
global_batch: $3
precision: $4
${6:-}
PLAN
}

# execute KIND NAME STEPS: trains plan NAME. Writes KIND/NAME.json, KIND/NAME.log, and the time by
# kind of kernel to KIND/NAME.check.
execute() {
    mkdir -p "$results/$1"
    at_most 180 "$programs/foretell" execute --plan "$work/$2.yaml" --steps "$3" --data synthetic --no-evaluation --oversubscribe \
        --run "$work/$1-$2" --json >"$results/$1/$2.json" 2>"$results/$1/$2.log"
    local status=$?
    if [ $status = 125 ]; then
        # No time was left, which is not a failure.
        rm -f "$results/$1/$2.json"
        return
    fi
    [ $status = 0 ] || echo "$1 $2: $(tail -1 "$results/$1/$2.log")"
    [ -f "$work/$1-$2/ranks/0.log" ] && cat "$work/$1-$2/ranks/0.log" >>"$results/$1/$2.log"
    "$programs/foretell" check "$work/$1-$2" --json >"$results/$1/$2.check" 2>>"$results/$1/$2.log"
}

# The tests that use the GPU. Tests of the emulated device are skipped: they need the sources at the
# path where they were built.
gpu_tests="cuda parts:: ring:: tensor_attention a_call_that a_control --skip backend::cuda --skip tensor_cores_are_used"
# cuDNN must have engines on this GPU. Otherwise the suite would pass without cuDNN.
cudnn_tests="cudnn_has_engines_on library::cudnn::tests::library"

part_kernels() {
    # shellcheck disable=SC2086
    FORETELL_TEST_GPU=0 at_most 280 "$programs/executor-tests" --test-threads 6 $gpu_tests >"$results/kernels.log" 2>&1
    echo $? >"$results/kernels.status"
}

part_cudnn() {
    # shellcheck disable=SC2086
    FORETELL_REQUIRE_CUDNN=1 FORETELL_TEST_GPU=0 at_most 120 "$programs/executor-tests" --test-threads 1 --nocapture $cudnn_tests >"$results/cudnn.log" 2>&1
    echo $? >"$results/cudnn.status"
}

# Not in the default: accesses out of bounds, and races in shared memory.
part_sanitize() {
    for tool in memcheck racecheck; do
        FORETELL_TEST_GPU=0 at_most 280 compute-sanitizer --tool $tool --error-exitcode 9 "$programs/executor-tests" --test-threads 1 \
            tensor_attention parts:: ring:: --skip tensor_cores_are_used >"$results/$tool.log" 2>&1
        echo $? >"$results/$tool.status"
    done
}

gpt='{family: gpt, layers: 4, hidden: 128, heads: 8, vocab: 512, sequence: 64, tied_embeddings: true}'
small_resnet='{family: resnet, depth: 18, stem: small, image: 32, channels: 3, classes: 10}'

part_law() {
    local layouts=("one={micro_batch: 2}" "data={data: 2, micro_batch: 2}" "tensor={tensor: 2, sequence_parallel: true, micro_batch: 2}"
        "pipeline={pipeline: 2, micro_batch: 2}" "zero3={data: 2, zero: 3, micro_batch: 2}" "context={context: 2, micro_batch: 2}"
        "mixed={data: 2, tensor: 2, micro_batch: 2}")
    for layout in "${layouts[@]}"; do
        ranks=8 plan "gpt-fp32.${layout%%=*}" "$gpt" 8 fp32 "${layout#*=}"
        execute law "gpt-fp32.${layout%%=*}" 10
        ranks=8 plan "gpt-bf16.${layout%%=*}" "$gpt" 8 bf16 "${layout#*=}"
        execute law "gpt-bf16.${layout%%=*}" 10
        ranks=8 plan "gpt-fp8.${layout%%=*}" "$gpt" 8 fp8 "${layout#*=}"
        execute law "gpt-fp8.${layout%%=*}" 10
        # In bf16, heads of 64 features run on tensor cores.
        ranks=8 plan "gpt64-bf16.${layout%%=*}" "${gpt/heads: 8/heads: 2}" 8 bf16 "${layout#*=}"
        execute law "gpt64-bf16.${layout%%=*}" 10
    done
    for layout in "one={micro_batch: 8}" "data={data: 2, micro_batch: 8}"; do
        ranks=8 plan "resnet-fp32.${layout%%=*}" "$small_resnet" 32 fp32 "${layout#*=}" $'batch_norm_group: 8\ntraining: {learning_rate: 0.005}'
        execute law "resnet-fp32.${layout%%=*}" 10
    done
}

part_train() {
    plan gpt2 gpt2 8 bf16 '{micro_batch: 8}' "optimizer: adamw"
    execute train gpt2 60
    plan gpt2-fp8 gpt2 8 fp8 '{micro_batch: 8}' "optimizer: adamw"
    execute train gpt2-fp8 60
    plan resnet50 resnet50 64 bf16 '{micro_batch: 64}' "training: {learning_rate: 0.02}"
    execute train resnet50 60
    python3 - "$results/train" <<'CHECK'
import json, pathlib, sys
for path in sorted(pathlib.Path(sys.argv[1]).glob("*.json")):
    loss = json.loads(path.read_text())["loss"]
    assert sum(loss[-5:]) < sum(loss[:5]), f"{path.stem}: the loss does not fall: {loss}"
CHECK
    echo $? >"$results/train.status"
}

# part_speed [CASE..]: times Foretell and PyTorch, the most telling cases first.
part_speed() {
    local large='{family: gpt, layers: 24, hidden: 2048, heads: 16, vocab: 50257, tied_embeddings: true'
    plan gpt-1.3b-s1024-b8 "$large, sequence: 1024}" 8 bf16 '{micro_batch: 8}' "optimizer: adamw"
    plan gpt-1.3b-s2048-b4 "$large, sequence: 2048}" 4 bf16 '{micro_batch: 4}' "optimizer: adamw"
    plan gpt-1.3b-s1024-b8-fp8 "$large, sequence: 1024}" 8 fp8 '{micro_batch: 8}' "optimizer: adamw"
    plan resnet50-b256 resnet50 256 bf16 '{micro_batch: 256}'
    plan gpt2-s1024-b16 gpt2 16 bf16 '{micro_batch: 16}' "optimizer: adamw"
    plan bert-base-s512-b32 '{family: bert, layers: 12, hidden: 768, heads: 12, vocab: 30522, sequence: 512}' 32 bf16 '{micro_batch: 32}' "optimizer: adamw"
    local cases=("$@")
    [ ${#cases[@]} = 0 ] && cases=(gpt-1.3b-s1024-b8 gpt-1.3b-s1024-b8-fp8 resnet50-b256 gpt2-s1024-b16 bert-base-s512-b32 gpt-1.3b-s2048-b4)
    # Foretell's cases come first, because PyTorch's compilation takes long.
    for case in "${cases[@]}"; do
        execute speed "$case" 45
        bring >/dev/null
    done
    for case in "${cases[@]}"; do
        # PyTorch itself does not train in fp8.
        [ "${case%-fp8}" = "$case" ] || continue
        at_most 160 python3 tests/gpu/pytorch.py "$case" >>"$results/pytorch.jsonl" 2>>"$results/pytorch.log"
        bring >/dev/null
    done
}

part_prediction() {
    mkdir -p "$results/prediction"
    topology 1 >"$work/one-gpu.yaml"
    local number=0
    for batch in 4 8 16 32 64; do
        for layout in '{micro_batch: 4}' '{micro_batch: 4, recompute: full}' '{micro_batch: 2}' '{micro_batch: 1}'; do
            number=$((number + 1))
            local name="gpt-$number-b$batch"
            if [ $((deadline - SECONDS)) -lt 15 ]; then
                echo "no time was left for: prediction $name" | tee -a "$results/unrun.txt" >&2
                continue
            fi
            plan "$name" '{family: gpt, layers: 6, hidden: 512, heads: 8, vocab: 8192, sequence: 256, tied_embeddings: true}' \
                "$batch" bf16 "$layout" "optimizer: adamw"
            { at_most 60 "$programs/foretell" calibrate --topology "$work/one-gpu.yaml" --plan "$work/$name.yaml" --patience 2ms --calibration-time 1s -o "$work/$name.profile.yaml" &&
                at_most 60 "$programs/foretell" execute --plan "$work/$name.yaml" --profile "$work/$name.profile.yaml" --steps 60 --data synthetic \
                    --no-evaluation --run "$work/prediction-$name" --json >"$work/$name.execute.json" &&
                "$programs/foretell" check "$work/prediction-$name" --json >"$results/prediction/$name.json"; } >"$work/$name.log" 2>&1 ||
                { echo "prediction $name: $(tail -1 "$work/$name.log")"; cp "$work/$name.log" "$results/prediction/$name.log"; }
            bring >/dev/null
        done
    done
}

# Copies the results so far to OUT, in a few files.
bring() {
    python3 tests/gpu/summary.py "$results"
    local status=$?
    cp "$results/results.md" "$out/results.md"
    tar czf "$out/logs.tar.gz" -C "$results" .
    return $status
}

run() {
    out=$1
    shift
    for part in "$@"; do
        case "$part" in
        kernels | cudnn | law | train | speed | speed:?* | prediction | sanitize) ;;
        *) echo "there is no part \`$part\`; hint: see the head of tests/gpu.sh" >&2; return 2 ;;
        esac
    done
    for program in foretell executor-tests; do
        [ -x "$programs/$program" ] || { echo "\`$programs/$program\` is missing; hint: run \`tests/gpu.sh build\`, and carry target/gpu" >&2; return 2; }
    done
    work=$(mktemp -d)
    results=$work/results
    mkdir -p "$out" "$results"
    find_libraries
    { date -u; nvidia-smi; "$programs/foretell" doctor; } >"$results/machine.txt" 2>&1
    cp "$results/machine.txt" "$out/machine.txt"
    local parts=("$@") status=0
    [ ${#parts[@]} = 0 ] && parts=(kernels cudnn law train)
    for part in "${parts[@]}"; do
        local begun=$SECONDS
        case "$part" in
        speed:*) part_speed "${part#speed:}" ;;
        *) "part_$part" ;;
        esac
        echo "$part: $((SECONDS - begun)) s" | tee -a "$results/times.txt"
        bring >"$work/summary.txt"
        status=$?
    done
    cat "$work/summary.txt"
    return $status
}

case "${1:-}" in
build) build ;;
run) shift; run "${@:?the folder for results}" ;;
*) sed -n '2,14p' "$0"; exit 2 ;;
esac
