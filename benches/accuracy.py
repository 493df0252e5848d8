#!/usr/bin/env python3
"""Foretells and then runs layouts on this machine, and prints the table of docs/accuracy.md.

For each layout in turn: a calibration of its kernels, the prediction, then the run, each once. Nothing is tried again or left out.
Usage: cargo build --release && benches/accuracy.py [--foretell PATH] [--keep DIR] [--models NAME...]     (Python 3, nothing else)
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
LAYOUTS = ["data=1,tensor=1,pipeline=1", "data=2,tensor=1,pipeline=1", "data=1,tensor=2,pipeline=1", "data=1,tensor=1,pipeline=2"]
# model: (global batch, steps, samples that share batch statistics)
MODELS = {
    "mlp": (256, 1000, None),
    str(ROOT / "examples/small-resnet.yaml"): (32, 1000, 8),
    str(ROOT / "examples/small-gpt.yaml"): (16, 200, None),
}


def call(program, *arguments):
    done = subprocess.run([program, *map(str, arguments), "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, arguments))}\n{done.stderr}")
    return json.loads(done.stdout)


def one(program, scratch, model, fix):
    name = pathlib.Path(model).stem
    batch, steps, group = MODELS[model]
    stem = scratch / f"{name}-{fix.replace(',', '-').replace('=', '')}"
    plan, profile, run = stem.with_suffix(".plan.yaml"), stem.with_suffix(".profile.yaml"), stem.with_suffix(".run")
    grouped = ["--batch-norm-group", group] if group else []
    layout = call(program, "plan", "--model", model, "--topology", "local", "--global-batch", batch, *grouped,
                  "--fix", fix, "-o", plan)["plan"]["layout"]
    call(program, "calibrate", "--topology", "local", "--plan", plan, "--calibration-time", "8s", "-o", profile)
    call(program, "execute", "--plan", plan, "--profile", profile, "--steps", steps, "--no-evaluation", "--run", run)
    check = call(program, "check", run)
    predicted = json.loads((run / "predicted.json").read_text())
    where = f"data {layout['data']}, tensor {layout['tensor']}, pipeline {layout['pipeline']}; micro-batch {layout['micro_batch']}"
    if layout["pipeline"] > 1:
        where += f", {layout['schedule']}"
    milliseconds = [1e3 * value for value in (check["predicted_step_seconds"], predicted["step_seconds_p10"],
                                              predicted["step_seconds_p90"], check["measured_step_seconds"])]
    print("| {} | {} | {:.2f} ms | {:.2f}-{:.2f} | {:.2f} ms | {:+.1f} % | {:+.1f} % |".format(
        name, where, *milliseconds, 100 * check["error"], 100 * check["memory_error"]), flush=True)
    return check


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--foretell", default=str(ROOT / "target/release/foretell"))
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--keep", help="keep plans, profiles and runs in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(options.keep or scratch)
        scratch.mkdir(parents=True, exist_ok=True)
        print("| model | layout | foretold | 80 % interval (ms) | measured | error | memory error |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        models = [model for model in MODELS if not options.models or pathlib.Path(model).stem in options.models]
        checks = [one(options.foretell, scratch, model, fix) for model in models for fix in LAYOUTS]
    errors = sorted(abs(check["error"]) for check in checks)
    inside = sum(check["inside_interval"] for check in checks)
    print(f"\nmean absolute error {100 * sum(errors) / len(errors):.1f} %, worst {100 * errors[-1]:.1f} %; "
          f"{sum(error <= 0.1 for error in errors)} of {len(errors)} within 10 %; {inside} inside their interval")


if __name__ == "__main__":
    main()
