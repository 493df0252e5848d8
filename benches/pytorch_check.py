#!/usr/bin/env python3
"""PyTorch's own training on this machine's processors, predicted and then made: step, memory and operators.

    benches/pytorch_check.py --foretell target/release/foretell --python venv/bin/python [--jobs gpt lora-2] [--steps 12]

For each job: `foretell calibrate --stack hf-trainer`, then `foretell execute`, which predicts, has Hugging Face's Trainer
train (DDP over gloo where a job has two ranks), and compares. The Python needs torch, transformers, accelerate and peft, for
fine-tuning trl and bitsandbytes too, and PYTHONPATH the folder `python`. About a minute a job on two idle cores. Writes a Markdown table.
"""

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from pathlib import Path

GPT = dict(family="gpt", layers=6, hidden=512, heads=8, vocab=8192, sequence=256, tied_embeddings=True)
LLAMA = dict(family="llama", layers=6, hidden=512, heads=8, ffn=1376, vocab=8192, sequence=256)
QWEN = dict(family="decoder", layers=6, hidden=512, heads=8, kv_heads=4, ffn=1376, vocab=8192, sequence=256, norm="rms",
            feed_forward="gated_silu", positions="rotary", query_key_norm=True)
BERT = dict(family="bert", layers=6, hidden=512, heads=8, vocab=8192, sequence=256)
VIT = dict(family="vit", layers=6, hidden=384, heads=6, patch=16, image=224)
LORA = dict(training=dict(lora=dict(rank=16)))
# Fine-tuning, small: every method by the framework's own trainer.
SMALL = dict(family="llama", layers=4, hidden=256, heads=4, ffn=688, vocab=4096, sequence=128)
TUNED = dict(training=dict(lora=dict(rank=16, alpha=32), learning_rate=1e-3))


def tuned(method, batch, layout=None, precision="fp32", base_bits=None, precomputed=False, training=TUNED):
    workload = {name: value for name, value in dict(base_bits=base_bits, precomputed_reference=precomputed or None).items() if value}
    return SMALL, batch, layout or {}, dict(training, method=method, precision=precision, workload=workload)


JOBS = {
    "gpt": (GPT, 4, {}, {}),
    "gpt-2": (GPT, 4, dict(data=2), {}),
    "gpt-accumulate": (GPT, 4, dict(micro_batch=2), {}),
    "llama": (LLAMA, 4, {}, {}),
    "llama-2": (LLAMA, 4, dict(data=2), {}),
    "llama-recompute": (LLAMA, 4, dict(recompute="full"), {}),
    "lora": (LLAMA, 4, {}, LORA),
    "lora-2": (LLAMA, 4, dict(data=2), LORA),
    "qwen3": (QWEN, 4, {}, {}),
    "bert": (BERT, 4, {}, {}),
    "bert-2": (BERT, 4, dict(data=2), {}),
    "vit": (VIT, 8, {}, {}),
    "tuned-lora": tuned("lora", 4),
    "tuned-lora-2": tuned("lora", 4, dict(data=2)),
    "qlora": tuned("qlora", 4, precision="bf16"),
    "qlora-2": tuned("qlora", 4, dict(data=2), precision="bf16"),
    "int8": tuned("lora", 4, precision="bf16", base_bits=8),
    "dpo": tuned("dpo", 2),
    "dpo-2": tuned("dpo", 2, dict(data=2)),
    "dpo-full": tuned("dpo", 2, training=dict(training=dict(learning_rate=1e-4))),
    "dpo-precomputed": tuned("dpo", 2, precomputed=True),
    "dpo-qlora": tuned("dpo", 2, precision="bf16", base_bits=4),
    "reward": tuned("reward", 2),
    "orpo": tuned("orpo", 2),
    "kto": tuned("kto", 4),
}
# An operator kind counts if it takes this share of the measured operators.
NOTABLE = 0.03


def run(command, **more):
    done = subprocess.run(command, capture_output=True, text=True, **more)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stderr}")
    return done.stdout


def one(name, args, folder):
    model, batch, layout, more = JOBS[name]
    layout = dict(dict(data=1), **layout)
    layout.setdefault("micro_batch", batch // layout["data"])
    plan = dict(dict(model=model, topology="local", global_batch=batch, precision="fp32", optimizer="adamw", stack="hf-trainer",
                     layout=layout), **more)
    path, profile, made = folder / f"{name}.yaml", folder / f"{name}-profile.yaml", folder / name
    path.write_text(json.dumps(plan))
    run([args.foretell, "calibrate", "--stack", "hf-trainer", "--plan", path, "--python", args.python, "-o", profile])
    run([args.foretell, "execute", "--plan", path, "--profile", profile, "--python", args.python, "--run", made, "--overwrite",
         "--steps", str(args.steps)])
    told = json.loads(run([args.foretell, "check", made, "--json"]))
    total = sum(o["measured_seconds"] for o in told["operators"])
    kinds = [(o["name"], o["predicted_seconds"] / o["measured_seconds"] - 1) for o in told["operators"]
             if o["measured_seconds"] > NOTABLE * total]
    return told, kinds


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--foretell", default="target/release/foretell")
    parser.add_argument("--python", default="python3")
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--json", help="write every comparison into this file")
    args = parser.parse_args()
    args.foretell = os.path.abspath(args.foretell)
    errors, inside, memory, of_kinds, all_told = [], [], [], [], {}
    print("| job | predicted | 80 % interval | measured | error | memory | kinds of operators, worst |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | --- |")
    with tempfile.TemporaryDirectory() as folder:
        for name in args.jobs:
            told, kinds = one(name, args, Path(folder))
            all_told[name] = told
            errors.append(told["error"])
            inside.append(told["inside_interval"])
            memory.append(told["memory_error"])
            of_kinds += [abs(error) for _, error in kinds]
            worst = sorted(kinds, key=lambda kind: -abs(kind[1]))[:2]
            print(f"| {name} | {told['predicted_step_seconds']:.3f} s | {told['step_seconds_p10']:.3f}-{told['step_seconds_p90']:.3f} "
                  f"| {told['measured_step_seconds']:.3f} s | {told['error']:+.1%} | {told['memory_error']:+.2%} "
                  f"| {', '.join(f'{kind} {error:+.0%}' for kind, error in worst)} |", flush=True)
    print(f"\nmean absolute error {statistics.mean(map(abs, errors)):.1%}, bias {statistics.mean(errors):+.1%}, worst "
          f"{max(map(abs, errors)):.1%}; {sum(inside)} of {len(inside)} inside; memory {max(map(abs, memory)):.2%} at most; "
          f"{sum(e <= 0.15 for e in of_kinds)} of {len(of_kinds)} kinds of operators within 15 %")
    if args.json:
        Path(args.json).write_text(json.dumps(all_told))


if __name__ == "__main__":
    main()
