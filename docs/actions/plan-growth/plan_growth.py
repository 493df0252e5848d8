#!/usr/bin/env python3
"""Compares the predicted step and memory of plan files in this tree with those at another commit.

    plan_growth.py --base origin/main --most-step 5 --most-memory 5 plans/*.yaml

It prints a table in Markdown. The exit status is 1 if a plan's step or memory grew by more than the
limit, in per cent, or a plan stopped fitting; and 2 if a plan of this tree cannot be predicted. A plan
that only one of the commits has is listed and not compared. It needs git and `foretell`, and no GPU.
"""

import argparse
import json
import pathlib
import subprocess
import sys
import tempfile


def predicted(program, plan):
    """The prediction of a plan, or the program's message why there is none."""
    run = subprocess.run([program, "simulate", "--plan", str(plan), "--json"], capture_output=True, text=True)
    try:
        document = json.loads(run.stdout)
    except ValueError:
        return None, run.stderr.strip() or f"exit status {run.returncode}"
    # A plan that does not fit is predicted, with exit status 1.
    if "step_seconds" not in document:
        return None, document["error"]["message"]
    return document, None


def seconds(value):
    return f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.2f} ms"


def growth(before, after):
    return (after / before - 1) * 100 if before else 0.0


class Row:
    """A plan before and after."""

    def __init__(self, name, before, after):
        self.name, self.before, self.after = name, before, after
        self.step = growth(before["step_seconds"], after["step_seconds"])
        self.memory = growth(max(before["peak_memory_bytes"]), max(after["peak_memory_bytes"]))
        self.stops_fitting = before["fits"] and not after["fits"]

    def grew(self, most_step, most_memory):
        return self.step > most_step or self.memory > most_memory or self.stops_fitting

    def markdown(self, mark):
        held = max(self.after["peak_memory_bytes"]) / 2**30
        fits = "no longer fits" if self.stops_fitting else "fits" if self.after["fits"] else "does not fit"
        return (
            f"| {mark}`{self.name}` | {seconds(self.before['step_seconds'])} | {seconds(self.after['step_seconds'])} | {self.step:+.1f} % "
            f"| {held:.2f} GiB | {self.memory:+.1f} % | {fits} |"
        )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("plans", nargs="+", help="plan files of this tree")
    parser.add_argument("--base", required=True, help="the commit to compare with")
    parser.add_argument("--most-step", type=float, default=5.0, help="most growth of the step, in per cent")
    parser.add_argument("--most-memory", type=float, default=5.0, help="most growth of the memory, in per cent")
    parser.add_argument("--program", default="foretell")
    options = parser.parse_args()

    root = pathlib.Path(subprocess.run(["git", "rev-parse", "--show-toplevel"], check=True, capture_output=True, text=True).stdout.strip())
    print("| plan | step before | step | change | memory | change | |\n| --- | --- | --- | --- | --- | --- | --- |")
    grown, failed = [], []
    with tempfile.TemporaryDirectory() as folder:
        base = pathlib.Path(folder) / "base"
        # A whole tree: plans name models and topologies by relative paths.
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(base), options.base], check=True)
        try:
            for plan in options.plans:
                name = pathlib.Path(plan).resolve().relative_to(root.resolve())
                after, problem = predicted(options.program, plan)
                if problem:
                    failed.append(name)
                    print(f"| `{name}` | | cannot be predicted: {problem} | | | | |")
                    continue
                before, problem = predicted(options.program, base / name) if (base / name).is_file() else (None, "is new")
                if problem:
                    held = max(after["peak_memory_bytes"]) / 2**30
                    print(f"| `{name}` | {problem} | {seconds(after['step_seconds'])} | | {held:.2f} GiB | | |")
                    continue
                row = Row(name, before, after)
                has_grown = row.grew(options.most_step, options.most_memory)
                if has_grown:
                    grown.append(name)
                print(row.markdown("**grew** " if has_grown else ""))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(base)], check=True)
    if grown:
        limits = f"{options.most_step:g} % in step or {options.most_memory:g} % in memory"
        print(f"\n{len(grown)} of {len(options.plans)} plans grew by more than {limits}, or no longer fit.", flush=True)
    sys.exit(2 if failed else 1 if grown else 0)


if __name__ == "__main__":
    main()
