#!/usr/bin/env python3
"""Predicts and runs modes in labs: samples a second and staleness, predicted beside measured.

Each plan is calibrated, predicted and run once, in this order. No result is repeated or left out. `--curves FOLDER` instead
trains an MLP, a small ResNet and a small GPT in each mode on this machine, times nothing, and writes their losses: `curves.csv`
and the plot `curves.svg`.
Usage: cargo build --release && benches/modes.py [--foretell PATH] [--models NAME...] [--topologies NAME...] [--steps N]
       benches/modes.py --curves FOLDER [--steps N] [--seed N]
Needs only Python 3. Labs need root (see `foretell doctor`).
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

import loss_curves

ROOT = pathlib.Path(__file__).resolve().parent.parent
# model: global batch
MODELS = {
    "mlp": 240,
    "small-gpt": 24,
    "small-llama": 24,
}
TOPOLOGIES = ["lab-4x1g-200m", "lab-hetero"]
# name: (replicas in a lab of four, replicas in a lab of two, the plan's mode)
MODES = {
    "synchronous": (4, 2, "synchronous"),
    "local SGD, 10": (4, 2, "{local_sgd: {every: 10}}"),
    "DiLoCo, 10": (4, 2, "{local_sgd: {every: 10, outer: {optimizer: nesterov}}}"),
    "ring, 1": (4, 2, "{decentralised: {graph: ring, every: 1}}"),
    "servers, staleness 0": (3, None, "{parameter_server: {servers: 1}}"),
    "servers, staleness 2": (3, None, "{parameter_server: {servers: 1, staleness: 2}}"),
    "servers, unbounded": (3, None, "{parameter_server: {servers: 1, staleness: unbounded}}"),
}


def call(program, *arguments):
    done = subprocess.run([program, *map(str, arguments), "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, arguments))}\n{done.stderr}")
    return json.loads(done.stdout)


def one(options, scratch, topology, model, name):
    in_four, in_two, mode = MODES[name]
    replicas = in_two if topology == "lab-hetero" else in_four
    if replicas is None:
        return None
    batch = MODELS[model]
    stem = scratch / f"{topology}-{model}-{name.replace(' ', '-').replace(',', '')}"
    plan, profile, run = (stem.with_name(stem.name + end) for end in (".plan.yaml", ".profile.yaml", ".run"))
    path = ROOT / f"examples/{model}.yaml"
    plan.write_text(f"model: {path if path.exists() else model}\ntopology: {topology}\nglobal_batch: {batch}\noptimizer: adamw\n"
                    f"layout: {{data: {replicas}, micro_batch: {batch // replicas}}}\nmode: {mode}\n")
    shared = ["--oversubscribe"] if options.oversubscribe else []
    call(options.foretell, "calibrate", "--topology", topology, "--plan", plan, "--calibration-time", options.calibration, "-o", profile)
    predicted = call(options.foretell, "simulate", "--plan", plan, "--profile", profile, *shared)
    measured = call(options.foretell, "execute", "--plan", plan, "--profile", profile, "--steps", options.steps, "--no-evaluation",
                    "--run", run, *shared)
    rates = [document["samples_per_second"] for document in (predicted, measured)]
    staleness = [(predicted.get("paces") or {}).get("staleness", {}).get("mean", 0.0), measured["staleness"]["mean"]]
    error = rates[0] / rates[1] - 1
    print("| {} | {} | {} | {:.1f} | {:.1f} | {:+.1f} % | {:.2f} | {:.2f} |".format(
        topology, model, name, *rates, 100 * error, *staleness), flush=True)
    return abs(error)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--foretell", default=str(ROOT / "target/release/foretell"))
    parser.add_argument("--models", nargs="*", default=list(MODELS))
    parser.add_argument("--modes", nargs="*", default=list(MODES))
    parser.add_argument("--topologies", nargs="*", default=TOPOLOGIES)
    parser.add_argument("--steps", type=int, default=None, help="60, or 200 for curves")
    parser.add_argument("--calibration", default="4s")
    parser.add_argument("--oversubscribe", action="store_true", help="try the script on a topology that is too small")
    parser.add_argument("--curves", type=pathlib.Path, metavar="FOLDER", help="plot losses into this folder, and time nothing")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the curves")
    options = parser.parse_args()
    errors = []
    with tempfile.TemporaryDirectory() as scratch:
        if options.curves:
            steps = options.steps or 200
            loss_curves.run(options.foretell, ROOT, pathlib.Path(scratch), options.curves, loss_curves.MODELS, steps, options.seed)
            return
        options.steps = options.steps or 60
        print("| topology | model | mode | predicted samples/s | measured | error | predicted mean staleness | measured |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for topology in options.topologies:
            in_lab = topology.startswith("lab-")
            if in_lab:
                subprocess.run([options.foretell, "lab", "up", "--topology", topology], check=True, stdout=subprocess.DEVNULL)
            try:
                for model in options.models:
                    for name in options.modes:
                        errors.append(one(options, pathlib.Path(scratch), topology, model, name))
            finally:
                if in_lab:
                    subprocess.run([options.foretell, "lab", "down", "--topology", topology], check=True, stdout=subprocess.DEVNULL)
    errors = [error for error in errors if error is not None]
    print(f"\n{len(errors)} pairs of mode and model: mean absolute error {100 * sum(errors) / len(errors):.1f} %, "
          f"worst {100 * max(errors):.1f} %")


if __name__ == "__main__":
    main()
