#!/usr/bin/env python3
"""Lays the planner's answers beside the layouts of public training runs.

Each file of benches/famous_jobs/ is a plan: model, cluster, batch and layout as published, with the source in its first lines. Its
stack is what people run today, and both are simulated under it. This script simulates that plan, plans the same job from nothing,
and prints both step times. The answer wins if the ratio is at most 1.

Usage: cargo build --release && benches/famous_jobs.py [NAME...] [--time-limit 10s] [--foretell PATH]
Needs only Python 3. `user` is the processor time of the search, which other work on the machine disturbs little.
"""
import argparse
import json
import pathlib
import re
import resource
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
JOBS = ROOT / "benches" / "famous_jobs"


def top_level(text, key):
    """Returns a top-level value of a plan file: one line, or the lines that are indented below it."""
    line = re.search(rf"^{key}: *(.*)$", text, re.M)
    if line is None:
        return None
    if line.group(1):
        return line.group(1)
    below = re.search(rf"^{key}:\n((?:  .*\n)+)", text, re.M).group(1)
    return "".join(line[2:] + "\n" for line in below.splitlines())


def options(path, folder):
    """Returns the options of `plan` for the job of a plan file. A model or topology in place is written to a file."""
    text = path.read_text()
    found = []
    for key in ["model", "topology", "nodes", "global_batch", "precision", "optimizer", "stack"]:
        value = top_level(text, key)
        if value is None:
            continue
        if key in ("model", "topology") and ("{" in value or "\n" in value):
            file = pathlib.Path(folder) / f"{path.stem}.{key}.yaml"
            file.write_text(value)
            value = str(file)
        found += ["--" + key.replace("_", "-"), value]
    return found


def run(command):
    """Runs a command that prints JSON. Returns the document, or the error, and seconds of wall and of processor time."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime, time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True)
    wall, user = time.monotonic() - started, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
    # `simulate` fails for a plan that does not fit, and prints its step all the same.
    document = json.loads(done.stdout) if done.stdout else {}
    if "error" in document:
        document = {"error": document["error"]["message"][:90]}
    elif not document:
        document = {"error": done.stderr.strip()[:90]}
    return document, wall, user


def percent(share):
    return "-" if share is None else f"{100 * share:.1f} %"


def first_answer(progress):
    """Returns when a search had its first answer, by the first line of its progress that has a time."""
    times = re.findall(r'"seconds":([0-9.e+-]+)', progress.read_text()) if progress.exists() else []
    return f"{float(times[0]):.2f} s" if times else "-"


def words(layout):
    sizes = [f"{name[0]}{layout[name]}" for name in ("data", "tensor", "pipeline", "context", "expert") if layout.get(name, 1) > 1]
    return " ".join(sizes + [f"m{layout['micro_batch']}", f"v{layout['virtual_stages']}", f"z{layout['zero']}", str(layout["recompute"])[:24]])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--time-limit", default="10s")
    parser.add_argument("--foretell", default=str(ROOT / "target" / "release" / "foretell"))
    arguments = parser.parse_args()
    names = arguments.names or sorted(path.stem for path in JOBS.glob("*.yaml"))
    print("| job | published | answer | ratio | gap | gap of any plan file | cut off | first answer | wall | user | answer's layout |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | --- |")
    lost = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            path = JOBS / f"{name}.yaml"
            published, _, _ = run([arguments.foretell, "simulate", "--plan", str(path), "--json"])
            job = options(path, folder)
            progress = pathlib.Path(folder) / "progress.jsonl"
            planned, wall, user = run([arguments.foretell, "plan", *job, "--time-limit", arguments.time_limit, "--progress", str(progress),
                                       "--json"])
            if "error" in planned or "error" in published:
                print(f"| {name} | {published.get('error', '')} | {planned.get('error', '')} | | | | | | {wall:.1f} s | {user:.1f} s | |")
                lost += 1
                continue
            search, step = planned["search"], published["step_seconds"]
            fits = "" if published["fits"] else " (does not fit)"
            ratio, gap = search["best_seconds"] / step, search["gap"]
            lost += ratio > 1 and published["fits"]
            any_gap = search["best_seconds"] / search["bound_of_any_layout_seconds"] - 1 if search["bound_of_any_layout_seconds"] else None
            print(f"| {name} | {step:.4g} s{fits} | {search['best_seconds']:.4g} s | {ratio:.3f} | "
                  f"{percent(gap)} | {percent(any_gap)} | {'yes' if search['is_cut_off'] else 'no'} | {first_answer(progress)} | "
                  f"{wall:.1f} s | {user:.1f} s | "
                  f"{words(planned['plan']['layout'])} |", flush=True)
    raise SystemExit(1 if lost else 0)


main()
