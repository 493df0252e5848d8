#!/usr/bin/env python3
"""How good are the estimates that decide what is simulated first?

Draws random jobs as `beat_the_plan.py` does, plans each to the end, and follows its progress file: the best layout after the first
simulations (20, or `--simulations N`) over the best that the search ever found. Prints the share of jobs within 2 % of it, quantiles, and
the worst jobs. The progress file is written a few times a second, so a best layout may have been known earlier than is counted; jobs whose
simulations are too fast for it are left out.

Usage: cargo build --release && benches/first_simulations.py SEED JOBS [--simulations N] [--time-limit 30s] [--foretell PATH] [--large]
`--large` draws language models on two to sixteen whole nodes instead. Needs only Python 3. The jobs depend only on the seed.
"""
import argparse
import json
import pathlib
import random
import subprocess
import tempfile

import beat_the_plan

ROOT = pathlib.Path(__file__).resolve().parent.parent
CLUSTERS = ["dgx-a100-80g", "dgx-h100", "dgx-v100", "aws-p4d", "gcp-a3-mega", "hgx-h200"]
MODELS = ["gpt2-xl", "llama2-7b", "llama2-13b", "qwen3-14b", "mixtral-8x7b", "gpt-oss-20b", "qwen3-30b-a3b", "gemma2-9b", "deepseek-v2-lite",
          "bert-large-uncased", "flan-t5-xl"]


def draw(rng, is_large):
    """Returns the arguments of a job, and the files that they name."""
    if is_large:
        batch = rng.choice([32, 64, 96, 256, 512])
        return ["--model", rng.choice(MODELS), "--topology", rng.choice(CLUSTERS), "--nodes", str(rng.choice([2, 3, 4, 8, 16])),
                "--global-batch", str(batch)], {}
    model, topology = beat_the_plan.draw_model(rng), beat_the_plan.draw_topology(rng)
    devices = sum(node["count"] * node["devices"]["count"] for node in topology["nodes"])
    files = {"topology.yaml": topology}
    if not isinstance(model, str):
        files["model.yaml"], model = model, "model.yaml"
    batch = devices * rng.choice([2, 4, 8, 12])
    return ["--model", model, "--topology", "topology.yaml", "--global-batch", str(batch)], files


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("seed", type=int)
    parser.add_argument("jobs", type=int)
    parser.add_argument("--simulations", type=int, default=20)
    parser.add_argument("--time-limit", default="30s")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--foretell", default=str(ROOT / "target/release/foretell"))
    arguments = parser.parse_args()
    ratios, refused, too_fast = [], 0, 0
    for number in range(arguments.jobs):
        job, files = draw(random.Random(f"{arguments.seed} {number}"), arguments.large)
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            for name, content in files.items():
                (folder / name).write_text(json.dumps(content))
            command = [arguments.foretell, "plan", *job, "--time-limit", arguments.time_limit, "--progress", "progress.jsonl", "--json"]
            answer = subprocess.run(command, capture_output=True, text=True, cwd=folder)
            if answer.returncode:
                refused += 1
                continue
            lines = [json.loads(line).get("progress") for line in (folder / "progress.jsonl").read_text().splitlines()]
        progress = [line for line in lines if line and line.get("best")]
        if not progress:
            refused += 1
            continue
        early = [line["best"] for line in progress if line["simulated"] <= arguments.simulations]
        if not any(arguments.simulations // 2 <= line["simulated"] <= arguments.simulations for line in progress):
            too_fast += 1
            continue
        best = min(json.loads(answer.stdout)["search"]["best_seconds"], *(line["best"] for line in progress))
        ratios.append((min(early) / best, " ".join(job)))
    ratios.sort()
    if not ratios:
        raise SystemExit("no job was planned")
    quantile = lambda share: ratios[min(len(ratios) - 1, int(share * len(ratios)))][0]
    near = sum(ratio <= 1.02 for ratio, _ in ratios)
    print(f"{len(ratios)} jobs followed, {too_fast} too fast, {refused} without an answer")
    print(f"best of the first {arguments.simulations} simulations over the best found: within 2 % in {near} ({100 * near / len(ratios):.1f} %), "
          f"median {quantile(0.5):.4f}, p90 {quantile(0.9):.4f}, p95 {quantile(0.95):.4f}, worst {ratios[-1][0]:.4f}")
    for ratio, job in ratios[-5:]:
        print(f"  {ratio:.4f}  {job}")


if __name__ == "__main__":
    main()
