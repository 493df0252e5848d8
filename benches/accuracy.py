#!/usr/bin/env python3
"""Foretells and then runs layouts on this machine, and prints the table of docs/accuracy.md.

One calibration a model, before all of its runs; one prediction a layout, before its run; each run once. Nothing is tried again.
Usage: benches/accuracy.py [--steps N] [--foretell PATH]        (needs Python 3 and nothing else)
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
CASES = {
    # model: (global batch, steps, batch-norm group, layouts)
    "mlp": (256, 1500, None, ["data=1,tensor=1,pipeline=1", "data=2", "tensor=2", "pipeline=2"]),
    str(ROOT / "examples/small-resnet.yaml"): (32, 1500, 8, ["data=1,tensor=1,pipeline=1", "data=2", "tensor=2", "pipeline=2"]),
    str(ROOT / "examples/small-gpt.yaml"): (16, 250, None, ["data=1,tensor=1,pipeline=1", "data=2", "tensor=2", "pipeline=2"]),
}


def call(arguments):
    done = subprocess.run(arguments, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(arguments)}\n{done.stderr}")
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--foretell", default=str(ROOT / "target/release/foretell"))
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--keep", help="keep the runs' folders here")
    options = parser.parse_args()
    program = options.foretell
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(options.keep or scratch)
        scratch.mkdir(parents=True, exist_ok=True)
        print("| model | layout | predicted | 80 % interval | measured | error | memory error |")
        print("| --- | --- | --- | --- | --- | --- | --- |")
        for model, (batch, steps, group, layouts) in CASES.items():
            name = pathlib.Path(model).stem
            if options.models and name not in options.models:
                continue
            profile = scratch / f"{name}-profile.yaml"
            basic = ["--model", model, "--topology", "local", "--global-batch", str(batch)]
            call([program, "calibrate", *basic, "--patience", "60ms", "-o", str(profile), "--json"])
            for index, fix in enumerate(layouts):
                plan, run = scratch / f"{name}-{index}.yaml", scratch / f"{name}-{index}"
                grouped = ["--batch-norm-group", str(group)] if group else []
                call([program, "plan", *basic, *grouped, "--profile", str(profile), "--fix", fix, "-o", str(plan), "--json"])
                call([program, "execute", "--plan", str(plan), "--profile", str(profile), "--steps", str(steps),
                      "--no-evaluation", "--run", str(run), "--json"])
                check = call([program, "check", str(run), "--json"])
                predicted = json.loads((run / "predicted.json").read_text())
                layout = json.loads(json.dumps(call([program, "plan", *basic, *grouped, "--profile", str(profile), "--fix", fix, "--json"])))["plan"]["layout"]
                low, high = predicted["step_seconds_p10"], predicted["step_seconds_p90"]
                text = f"data {layout['data']} tensor {layout['tensor']} pipeline {layout['pipeline']}, micro-batch {layout['micro_batch']}"
                if layout["pipeline"] > 1:
                    text += f", {layout['schedule']}"
                print(f"| {name} | {text} | {check['predicted_step_seconds'] * 1e3:.2f} ms | {low * 1e3:.2f}-{high * 1e3:.2f} "
                      f"| {check['measured_step_seconds'] * 1e3:.2f} ms | {check['error'] * 100:+.1f} % | {check['memory_error'] * 100:+.1f} % |", flush=True)
                rows.append((check["error"], check["inside_interval"]))
    errors = [abs(error) for error, _ in rows]
    print(f"\nmean absolute error {sum(errors) / len(errors) * 100:.1f} %, worst {max(errors) * 100:.1f} %, "
          f"inside the interval {sum(inside for _, inside in rows)} of {len(rows)}")


if __name__ == "__main__":
    main()
