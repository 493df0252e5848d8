#!/usr/bin/env python3
"""Plans the same jobs with two builds of the program, one after the other, and prints both times and answers.

For each job: wall and processor time of `plan`, its step time and gap. All jobs use our own executor as the stack unless they say another,
since older builds assume no other. The first build is the older one.

Usage: benches/two_programs.py OLD NEW [--time-limit 30s] [--jobs NAME...]
Needs only Python 3.
"""
import argparse
import json
import pathlib
import resource
import subprocess
import tempfile
import time


def gpt(layers, hidden, heads, vocab=51200, sequence=2048):
    return f"family: gpt\nlayers: {layers}\nhidden: {hidden}\nheads: {heads}\nvocab: {vocab}\nsequence: {sequence}\n"


def nodes(*groups):
    """A topology of groups of nodes: (kind, nodes, devices of each, network cards, rate of a card)."""
    kinds = "".join(f"  {kind.split('-')[0]}: {{base: {kind}}}\n" for kind in dict.fromkeys(group[0] for group in groups))
    listed = "".join(
        f"  - {{name: n{index}, count: {count}, devices: {{kind: {kind.split('-')[0]}, count: {devices}}}, link: nvswitch-300GB/s, "
        f"nics: {{count: {cards}, bandwidth: {rate}}}}}\n"
        for index, (kind, count, devices, cards, rate) in enumerate(groups)
    )
    return f"name: drawn\ndevices:\n{kinds}nodes:\n{listed}network: {{kind: switch, latency: 5us}}\n"


A100, V100, H100 = "a100-sxm-80g", "v100-sxm-32g", "h100-sxm-80g"
MIXTURE = (
    "family: moe\nlayers: 61\nhidden: 7168\nheads: 128\nkv_heads: 128\nffn: 2048\nvocab: 129280\nsequence: 4096\nexperts: 256\ntop_k: 8\n"
)
# Name: model, topology, nodes, global batch, further options.
JOBS = {
    "ResNet-50 on a DGX A100": ("resnet50", "dgx-a100-80g", 1, 256, []),
    "GPT-3 175B on 512 A100s": (gpt(96, 12288, 96), "dgx-a100-80g", 64, 512, []),
    "Turing-NLG 530B on 5,128 A100s": (gpt(105, 20480, 128), "dgx-a100-80g", 641, 2520, []),
    "BLOOM-176B on 384 A100s": (gpt(70, 14336, 112, 250880), "dgx-a100-80g", 48, 2048, []),
    "ResNet-50 on 256 V100s": ("resnet50", "dgx-v100", 32, 8192, []),
    "T5-base on 28 A100s": ("t5-base", nodes((A100, 7, 4, 1, "100Gbit/s")), None, 1792, []),
    "31-layer GPT on 40 A100s, 10 Gbit/s": (gpt(31, 4096, 32), nodes((A100, 5, 8, 1, "10Gbit/s")), None, 320, []),
    "GPT-2 XL on 32 A100s, 25 Gbit/s": ("gpt2-xl", nodes((A100, 4, 8, 1, "25Gbit/s")), None, 512, []),
    "24-layer GPT on 16 A100s and 32 V100s": (gpt(24, 2048, 16), nodes((A100, 2, 8, 4, "100Gbit/s"), (V100, 4, 8, 1, "100Gbit/s")), None, 384, []),
    "ResNet-50 on 16 A100s and 32 V100s": ("resnet50", nodes((A100, 2, 8, 4, "100Gbit/s"), (V100, 4, 8, 1, "100Gbit/s")), None, 4096, []),
    "GPT-3 175B on 5,000 A100s and 5,000 H100s": (gpt(96, 12288, 96), nodes((A100, 625, 8, 8, "200Gbit/s"), (H100, 625, 8, 8, "400Gbit/s")), None, 10000, []),
    "Llama-3 70B on 128 H100s, megatron-core": ("llama3-70b", "dgx-h100", 16, 512, ["--stack", "megatron-core"]),
    "Llama-3 405B on 16,384 H100s": ("llama3-405b", "dgx-h100", 2048, 2048, []),
    "a mixture of 671B on 2,048 H100s": (MIXTURE, "dgx-h100", 256, 15360, []),
    "GPT-3 175B with `tensor=7`": (gpt(96, 12288, 96), "dgx-a100-80g", 64, 512, ["--fix", "tensor=7"]),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("programs", nargs=2, metavar="PROGRAM")
    parser.add_argument("--time-limit", default="30s", help="seconds, such as 10s")
    parser.add_argument("--jobs", nargs="*", default=[], help="only jobs whose names contain one of these")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, (model, topology, count, batch, further)) in enumerate(JOBS.items()):
            if arguments.jobs and not any(part in name for part in arguments.jobs):
                continue
            files = []
            for what, text in [("model", model), ("topology", topology)]:
                if "\n" in text:
                    file = pathlib.Path(folder) / f"{number}.{what}.yaml"
                    file.write_text(text)
                    text = str(file)
                files += [f"--{what}", text]
            options = files + (["--nodes", str(count)] if count else []) + ["--global-batch", str(batch), "--precision", "bf16"]
            stack = further if "--stack" in further else further + ["--stack", "foretell"]
            steps = []
            for label, program in zip(["old", "new"], arguments.programs):
                before, started = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, time.monotonic()
                try:
                    command = [program, "plan", *options, *stack, "--time-limit", arguments.time_limit, "--top", "1", "--json"]
                    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
                    found, error = (json.loads(done.stdout) if done.stdout else {}), [line for line in done.stderr.splitlines() if line.startswith("error")]
                except subprocess.TimeoutExpired:
                    found, error = {}, ["ended after 300 s"]
                except ValueError:
                    found, error = {}, ["printed no JSON"]
                wall, user = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
                search = found.get("search", {})
                if search:
                    step = found["predicted"]["step_seconds"]
                    steps.append(step)
                    said = f"step {step:.4g} s, gap {search['gap'] * 100 if search['gap'] is not None else float('inf'):.1f} %"
                    # Older builds do not say so.
                    said += ", cut off" if search.get("is_cut_off", wall > float(arguments.time_limit.rstrip("s"))) else ""
                else:
                    said = "no answer: " + " ".join(error)[:150]
                print(f"{name:<44} {label}  wall {wall:6.2f} s, processor {user:6.2f} s, {said}", flush=True)
            if len(steps) == 2:
                print(f"{'':<44} new step over old: {steps[1] / steps[0]:.3f}", flush=True)


if __name__ == "__main__":
    main()
