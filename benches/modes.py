#!/usr/bin/env python3
"""Predicts and runs modes in labs: samples a second and staleness, predicted beside measured.

Each plan is calibrated, predicted and run once, in this order. No result is repeated or left out. `--curves FILE` also
writes the loss of every step, as CSV: topology, model, mode, step, loss.
Usage: cargo build --release && benches/modes.py [--foretell PATH] [--models NAME...] [--topologies NAME...] [--steps N]
Needs only Python 3. Labs need root (see `foretell doctor`).
"""
import argparse
import csv
import json
import pathlib
import subprocess
import sys
import tempfile

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


def one(options, scratch, topology, model, name, curves):
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
    if curves:
        curves.writerows([topology, model, name, step, loss] for step, loss in enumerate(measured["loss"]))
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
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--calibration", default="4s")
    parser.add_argument("--oversubscribe", action="store_true", help="try the script on a topology that is too small")
    parser.add_argument("--curves", help="write the loss of every step to this file")
    options = parser.parse_args()
    errors = []
    with tempfile.TemporaryDirectory() as scratch, open(options.curves or "/dev/null", "w", newline="") as file:
        curves = csv.writer(file) if options.curves else None
        print("| topology | model | mode | predicted samples/s | measured | error | predicted mean staleness | measured |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for topology in options.topologies:
            in_lab = topology.startswith("lab-")
            if in_lab:
                subprocess.run([options.foretell, "lab", "up", "--topology", topology], check=True, stdout=subprocess.DEVNULL)
            try:
                for model in options.models:
                    for name in options.modes:
                        errors.append(one(options, pathlib.Path(scratch), topology, model, name, curves))
            finally:
                if in_lab:
                    subprocess.run([options.foretell, "lab", "down", "--topology", topology], check=True, stdout=subprocess.DEVNULL)
    errors = [error for error in errors if error is not None]
    print(f"\n{len(errors)} pairs of mode and model: mean absolute error {100 * sum(errors) / len(errors):.1f} %, "
          f"worst {100 * max(errors):.1f} %")


if __name__ == "__main__":
    main()
