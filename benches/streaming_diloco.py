#!/usr/bin/env python3
"""Table 4 of Streaming DiLoCo (arXiv 2501.18512) by `foretell simulate`: the bandwidth between two replicas at which a share of
the time is computation.

A replica is one device here, as fast as makes a step without exchanges take what the paper states. The grid of bandwidths is the
paper's: a factor of 1.207 from value to value. Fragments have three layers, and changes travel in bf16. Gradients of data parallelism
travel in single precision here, so its values are halved. In brackets: steps of the grid from the paper's value.
Usage: cargo build --release && benches/streaming_diloco.py [--foretell PATH]
Needs only Python 3.
"""
import argparse
import bisect
import json
import math
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SHARES = [0.5, 0.8, 0.9, 0.95, 0.99]
# Gbit/s: the values of the paper's table lie on this grid.
GRID = [0.1 * 1.207 ** step for step in range(80)]
# name: (model, seconds of a step, the paper's rows)
MODELS = {
    "10B": ("{family: gpt, layers: 48, hidden: 4096, heads: 32, vocab: 32000, sequence: 2048, tied_embeddings: false}", 0.8, 16,
            [[104.8, 222.3, 222.3, 268.3, 471.5], [1.7, 7.5, 16, 33.9, 104.8], [1.7, 5.2, 9.1, 13.3, 19.3], [1.7, 3.6, 5.2, 6.2, 7.5]]),
    "100B": ("{family: gpt, layers: 108, hidden: 8768, heads: 64, vocab: 32000, sequence: 2048, tied_embeddings: false}", 4.9, 36,
             [[184.2, 323.8, 390.7, 390.7, 471.5], [3, 11, 23.3, 49.4, 184.2], [2.4, 6.2, 9.1, 11, 19.3], [1.7, 3.6, 4.3, 5.2, 5.2]]),
}
# What an exchange takes of the link in the paper, as its DiLoCo rows from 50 to 90 % imply (124 to
# 134 Gbit, 1220 to 1268 Gbit), over ours: all parameters in 16 bits, at the 92 % of the line rate
# that our links reach (173 and 1742 Gbit).
TRAFFIC = {"10B": 129 / 173, "100B": 1244 / 1742}
DILOCO = "local_sgd: {every: 100, outer: {optimizer: nesterov}, compression: bf16"
# name, mode, divisor of the bandwidth
MODES = [("data parallel, halved", "synchronous", 2), ("DiLoCo", f"{{{DILOCO}}}}}", 1),
         ("streaming", f"{{{DILOCO}, fragments: FRAGMENTS}}}}", 1),
         ("streaming, overlap 1", f"{{{DILOCO}, fragments: FRAGMENTS, overlap: 1}}}}", 1)]


def step(foretell, folder, model, mode, peak, bandwidth):
    """The seconds of the mean step with so many TFLOP/s a replica and Gbit/s between the two, and the share that computes."""
    (folder / "topology.yaml").write_text(
        "name: replicas\ndevices:\n"
        f"  replica: {{architecture: gpu, memory: 8000GiB, memory_bandwidth: 10000TB/s, peak: {{fp32: {peak:.6f}TFLOP/s, "
        f"bf16: {peak:.6f}TFLOP/s}}, power: 1kW}}\n"
        "nodes:\n  - {name: site, count: 2, devices: {kind: replica, count: 1}, link: nvswitch-300GB/s, "
        f"nics: {{count: 1, bandwidth: {bandwidth:.6f}Gbit/s}}}}\n"
        "network: {kind: fat-tree, oversubscription: 1, nodes_per_leaf: 1, latency: 5us}\n")
    (folder / "plan.yaml").write_text(
        f"model: {model}\ntopology: topology.yaml\nlayout: {{data: 2, micro_batch: 32}}\nglobal_batch: 64\nprecision: bf16\n"
        f"optimizer: adamw\nmode: {mode}\n")
    done = subprocess.run([foretell, "simulate", "--plan", folder / "plan.yaml", "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    answer = json.loads(done.stdout)
    return answer["step_seconds"], 1 - answer["breakdown_seconds"]["exposed_communication"] / answer["step_seconds"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--foretell", default=str(ROOT / "target/release/foretell"))
    options = parser.parse_args()
    print("| model | mode | | " + " | ".join(f"{100 * share:.0f} %" for share in SHARES) + " |")
    print("| --- | --- | --- |" + " --- |" * len(SHARES))
    with tempfile.TemporaryDirectory() as scratch:
        folder = pathlib.Path(scratch)
        for name, (model, seconds, fragments, paper) in MODELS.items():
            local = "{local_sgd: {every: 1000000}}"
            peak = 1000.0
            for _ in range(3):
                peak *= step(options.foretell, folder, model, local, peak, 1e6)[0] / seconds
            for (mode, text, divisor), stated in zip(MODES, paper):
                text = text.replace("FRAGMENTS", str(fragments))
                print(f"| {name} | {mode} | paper | " + " | ".join(f"{value:g}" for value in stated) + " |", flush=True)
                for label, scale in [("ours", divisor), ("ours, with the paper's traffic", divisor / TRAFFIC[name])]:
                    known = {}

                    def computes(place):
                        if place not in known:
                            known[place] = step(options.foretell, folder, model, text, peak, GRID[place] * scale)[1]
                        return known[place]

                    found = [GRID[bisect.bisect_left(range(len(GRID)), share, key=computes)] for share in SHARES]
                    off = [round(math.log(ours / value) / math.log(1.207)) for ours, value in zip(found, stated)]
                    cells = [f"{value:.1f} ({steps:+d})" if steps else f"{value:.1f}" for value, steps in zip(found, off)]
                    print(f"| | | {label} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
