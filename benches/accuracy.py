#!/usr/bin/env python3
"""Predicts and runs layouts on this machine and in labs, and prints the table of docs/reference/accuracy.md.

Each layout is calibrated, predicted and run once, in this order. No result is repeated or left out.
Usage: cargo build --release && benches/accuracy.py [--foretell PATH] [--keep DIR] [--models NAME...] [--topologies NAME...]
       benches/accuracy.py --runs 20 [--json FILE]   the README's command so often: the machine's part of each error, and the model's
Needs only Python 3. Labs need root (see `foretell doctor`).
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
# model: (global batch, steps on this machine, steps in a lab, batch norm group or None)
MODELS = {
    "mlp": (256, 1000, 150, None),
    str(ROOT / "examples/small-resnet.yaml"): (32, 1000, 100, 8),
    str(ROOT / "examples/small-gpt.yaml"): (16, 200, 40, None),
    str(ROOT / "examples/small-llama.yaml"): (16, 200, 40, None),
    str(ROOT / "examples/small-bert.yaml"): (16, 200, 40, None),
}
# topology: (layout, the models to run it with, or None for all)
LAYOUTS = {
    "local": [
        ("data=1,tensor=1,pipeline=1", None),
        ("data=2,tensor=1,pipeline=1", None),
        ("data=1,tensor=2,pipeline=1", None),
        ("data=1,tensor=1,pipeline=2", None),
    ],
    "lab-2x1g": [
        ("data=2,tensor=1,pipeline=1", ["mlp", "small-gpt"]),
        ("data=1,tensor=1,pipeline=2", ["small-resnet", "small-llama"]),
        ("data=1,tensor=2,pipeline=1", ["small-bert"]),
    ],
    "lab-4x1g-200m": [
        ("data=4,tensor=1,pipeline=1", ["small-resnet", "small-llama"]),
        ("data=2,tensor=1,pipeline=2", ["small-gpt", "small-bert"]),
        ("data=1,tensor=1,pipeline=4", ["small-gpt"]),
    ],
    "lab-hetero": [
        ("data=2,tensor=1,pipeline=1", ["small-gpt"]),
        ("data=1,tensor=1,pipeline=2", ["small-bert", "mlp"]),
    ],
}


def call(program, *arguments):
    done = subprocess.run([program, *map(str, arguments), "--json"], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, arguments))}\n{done.stderr}")
    return json.loads(done.stdout)


def one(program, scratch, topology, model, fix):
    name = pathlib.Path(model).stem
    batch, here, in_lab, group = MODELS[model]
    steps = here if topology == "local" else in_lab
    stem = scratch / f"{topology}-{name}-{fix.replace(',', '-').replace('=', '')}"
    plan, profile, run = (stem.with_name(stem.name + end) for end in (".plan.yaml", ".profile.yaml", ".run"))
    grouped = ["--batch-norm-group", group] if group else []
    layout = call(program, "plan", "--model", model, "--topology", topology, "--global-batch", batch, *grouped,
                  "--fix", fix, "-o", plan)["plan"]["layout"]
    call(program, "calibrate", "--topology", topology, "--plan", plan, "--calibration-time", "8s", "-o", profile)
    call(program, "execute", "--plan", plan, "--profile", profile, "--steps", steps, "--no-evaluation", "--run", run)
    check = call(program, "check", run)
    predicted = json.loads((run / "predicted.json").read_text())
    where = f"data {layout['data']}, tensor {layout['tensor']}, pipeline {layout['pipeline']}; micro-batch {layout['micro_batch']}"
    if layout["pipeline"] > 1:
        where += f", {layout['schedule']}"
    milliseconds = [1e3 * value for value in (check["predicted_step_seconds"], predicted["step_seconds_p05"],
                                              predicted["step_seconds_p95"], check["measured_step_seconds"])]
    # Without a reference kernel in the profile the parts are unknown.
    parts = ["-" if check[key] is None else f"{100 * check[key]:+.1f} %" for key in ("machine_error", "model_error")]
    print("| {} | {} | {} | {:.2f} ms | {:.2f}-{:.2f} | {:.2f} ms | {:+.1f} % | {} | {} | {:+.1f} % |".format(
        topology, name, where, *milliseconds, 100 * check["error"], *parts, 100 * check["memory_error"]), flush=True)
    check["inside"] = predicted["step_seconds_p05"] <= check["measured_step_seconds"] <= predicted["step_seconds_p95"]
    return check


def repeated(program, scratch, count):
    """Runs the README's command `count` times. Each run calibrates, plans and predicts before it trains."""
    print("| run | layout | predicted | 80 % interval (ms) | measured | error | inside | machine's pace | machine error | model error |"
          " inside at that pace |")
    print("| ---: | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    rows = []
    for number in range(1, count + 1):
        document = call(program, "run", "--model", "mlp", "--topology", "local", "--epochs", "10", "--run", scratch / f"run{number}")
        check, predicted, at_pace = document["check"], document["predicted"], document["check"]["at_pace"]
        layout = document["plan"]["plan"]["layout"]
        row = {"data": layout["data"], "tensor": layout["tensor"], "pipeline": layout["pipeline"],
               "predicted_step_seconds": check["predicted_step_seconds"], "measured_step_seconds": check["measured_step_seconds"],
               "error": check["error"], "inside_interval": check["inside_interval"], "pace": at_pace["pace"],
               "machine_error": check["machine_error"], "model_error": check["model_error"],
               "inside_interval_at_pace": at_pace["inside_interval"],
               "reference_kernels": at_pace["reference_kernels"], "reference_seconds": at_pace["reference_seconds"]}
        rows.append(row)
        times = [1e3 * value for value in (row["predicted_step_seconds"], predicted["step_seconds_p10"], predicted["step_seconds_p90"],
                                           row["measured_step_seconds"])]
        yes = {True: "yes", False: "no"}
        print("| {} | data {}, tensor {}, pipeline {} | {:.3f} ms | {:.3f}-{:.3f} | {:.3f} ms | {:+.1f} % | {} | {:.3f} | {:+.1f} % "
              "| {:+.1f} % | {} |".format(number, row["data"], row["tensor"], row["pipeline"], *times, 100 * row["error"],
                                          yes[row["inside_interval"]], row["pace"], 100 * row["machine_error"],
                                          100 * row["model_error"], yes[row["inside_interval_at_pace"]]), flush=True)
    def summary(key):
        values = [row[key] for row in rows]
        return {"mean_absolute": sum(map(abs, values)) / len(values), "worst_absolute": max(map(abs, values)),
                "bias": sum(values) / len(values)}
    totals = {key: summary(key) for key in ("error", "machine_error", "model_error")}
    for key in ("inside_interval", "inside_interval_at_pace"):
        totals[key] = sum(row[key] for row in rows) / len(rows)
    print()
    for key in ("error", "machine_error", "model_error"):
        one = {name: 100 * value for name, value in totals[key].items()}
        print(f"{key.replace('_', ' ')}: mean {one['mean_absolute']:.1f} %, worst {one['worst_absolute']:.1f} %, bias {one['bias']:+.1f} %")
    print(f"inside the 80 % interval: {100 * totals['inside_interval']:.0f} % of {count} runs, "
          f"{100 * totals['inside_interval_at_pace']:.0f} % at the machine's pace")
    return {"runs": rows, "totals": totals}


def is_wanted(only, topology, name, fix):
    """Returns whether a row matches one of the TOPOLOGY[:MODEL[:LAYOUT]] filters in `only`. Without filters all rows match."""
    def fits(asked):
        wanted = dict(zip(("topology", "model", "layout"), asked.split(":", 2)))
        return (wanted["topology"] == topology and wanted.get("model", name) == name and wanted.get("layout", fix) in fix)
    return not only or any(map(fits, only))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--foretell", default=str(ROOT / "target/release/foretell"))
    parser.add_argument("--models", nargs="*")
    parser.add_argument("--topologies", nargs="*", default=list(LAYOUTS))
    parser.add_argument("--only", nargs="*", metavar="TOPOLOGY:MODEL[:LAYOUT]", help="only these rows, e.g. local:small-bert:pipeline=2")
    parser.add_argument("--runs", type=int, metavar="N", help="only run the README's command N times, and split each error")
    parser.add_argument("--json", metavar="FILE", help="with --runs, also write the figures there")
    parser.add_argument("--keep", help="keep plans, profiles and runs in this folder")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(options.keep or scratch)
        scratch.mkdir(parents=True, exist_ok=True)
        if options.runs:
            found = repeated(options.foretell, scratch, options.runs)
            if options.json:
                pathlib.Path(options.json).write_text(json.dumps(found, indent=1) + "\n")
            return
        print("| topology | model | layout | predicted | 90 % interval (ms) | measured | error | machine error | model error | memory error |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        checks = []
        for topology in options.topologies:
            rows = [(name, fix) for name in map(lambda model: pathlib.Path(model).stem, MODELS) for fix, _ in LAYOUTS[topology]]
            if not any(is_wanted(options.only, topology, name, fix) for name, fix in rows):
                continue
            if topology != "local":
                subprocess.run([options.foretell, "lab", "up", "--topology", topology], check=True, stdout=subprocess.DEVNULL)
            try:
                for model in MODELS:
                    name = pathlib.Path(model).stem
                    if options.models and name not in options.models:
                        continue
                    for fix, names in LAYOUTS[topology]:
                        if (names is None or name in names) and is_wanted(options.only, topology, name, fix):
                            checks.append(one(options.foretell, scratch, topology, model, fix))
            finally:
                if topology != "local":
                    subprocess.run([options.foretell, "lab", "down", "--topology", topology], check=True, stdout=subprocess.DEVNULL)
    errors = sorted(abs(check["error"]) for check in checks)
    inside = sum(check["inside"] for check in checks)
    bias = sum(check["error"] for check in checks) / len(checks)
    print(f"\nmean absolute error {100 * sum(errors) / len(errors):.1f} %, worst {100 * errors[-1]:.1f} %, bias {100 * bias:+.1f} %; "
          f"{sum(error <= 0.1 for error in errors)} of {len(errors)} within 10 %; {inside} inside their 90 % interval "
          f"({100 * inside / len(checks):.0f} %)")


if __name__ == "__main__":
    main()
