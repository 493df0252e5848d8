#!/usr/bin/env python3
"""Predicts and runs every feasible layout of one model in a lab. Prints how well the predicted order matches the measured one
(Kendall's tau-b), and how much slower the planner's choice is than the fastest measured layout.

Usage: cargo build --release && benches/ranking.py [--foretell PATH] [--topology lab-4x1g-200m] [--model FILE] [--steps N] [--most N]
Needs Python 3 and root (see `foretell doctor`). Calibrates once, predicts all layouts, then runs them.
"""
import argparse
import itertools
import json
import pathlib
import signal
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent


def call(program, *arguments):
    done = subprocess.run([program, *map(str, arguments), "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, arguments))}\n{done.stderr}")
    return json.loads(done.stdout)


def kendall(pairs):
    """Returns Kendall's tau-b of (predicted, measured) pairs."""
    concordant = discordant = ties_left = ties_right = 0
    for (a, b), (c, d) in itertools.combinations(pairs, 2):
        left, right = (a > c) - (a < c), (b > d) - (b < d)
        concordant += left * right > 0
        discordant += left * right < 0
        ties_left += left == 0 and right != 0
        ties_right += right == 0 and left != 0
    decided = concordant + discordant
    return (concordant - discordant) / ((decided + ties_left) * (decided + ties_right)) ** 0.5


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--foretell", default=str(ROOT / "target/release/foretell"))
    parser.add_argument("--topology", default="lab-4x1g-200m")
    parser.add_argument("--model", default=str(ROOT / "examples/small-gpt.yaml"))
    parser.add_argument("--global-batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--most", type=int, help="run only this many layouts, those with the fastest predictions")
    options = parser.parse_args()
    program = options.foretell
    # Turns SIGTERM into an exception, so that `finally` takes the lab down.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        subprocess.run([program, "lab", "up", "--topology", options.topology], check=True, stdout=subprocess.DEVNULL)
        try:
            rank(program, scratch, options)
        finally:
            subprocess.run([program, "lab", "down", "--topology", options.topology], check=True, stdout=subprocess.DEVNULL)


def rank(program, scratch, options):
    profile = scratch / "profile.yaml"
    call(program, "calibrate", "--topology", options.topology, "--model", options.model, "--calibration-time", "30s", "-o", profile)
    search = call(program, "plan", "--model", options.model, "--topology", options.topology, "--profile", profile,
                  "--global-batch", options.global_batch, "--top", 1000)
    candidates = [{"plan": search["plan"], "predicted": search["predicted"]}, *search["alternatives"]]
    print(f"{len(candidates)} of {search['search']['layouts']} layouts, fastest prediction first\n")
    print("| layout | predicted | measured | error |\n| --- | --- | --- | --- |")
    pairs = []
    for number, candidate in enumerate(candidates[: options.most]):
        plan = scratch / f"{number}.yaml"
        plan.write_text(json.dumps(candidate["plan"]))
        predicted = candidate["predicted"]["step_seconds"]
        measured = call(program, "execute", "--plan", plan, "--steps", options.steps, "--no-evaluation",
                        "--run", scratch / f"run-{number}")["step_seconds_median"]
        pairs.append((predicted, measured))
        layout = candidate["plan"]["layout"]
        usual = (1, 0, False, None, "none", "gather")
        chosen = ", ".join(f"{key}: {value}" for key, value in layout.items() if value not in usual and key != "bucket")
        print(f"| {chosen} | {1e3 * predicted:.1f} ms | {1e3 * measured:.1f} ms | {100 * (predicted / measured - 1):+.1f} % |", flush=True)
    best = min(measured for _, measured in pairs)
    print(f"\nKendall's tau {kendall(pairs):.3f} over {len(pairs)} layouts; the planner's choice is "
          f"{100 * (pairs[0][1] / best - 1):.1f} % slower than the best measured")


if __name__ == "__main__":
    main()
