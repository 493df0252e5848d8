#!/usr/bin/env python3
"""Runs the cases of files that people have, and prints what came out beside what was expected, for a reader to judge.

A folder of cases has `cases.csv` (id, command, expected, got, class_of_fault) and `inputs/`. Commands run in that folder, with `OUT/`
replaced by a scratch folder. Nothing is judged here: an answer in other words may be right.

Usage: benches/file_cases.py FOLDER [--foretell target/debug/foretell] [--only PREFIX]... [--json results.json]
"""
import argparse
import csv
import json
import pathlib
import shlex
import subprocess
import tempfile

# Lines of a plan or topology that tell jobs apart.
SHOWN = ("family", "layers", "hidden", "kv_heads", "vocab", "sequence", "data:", "tensor:", "pipeline:", "context:", "expert:", "experts:",
         "virtual_stages", "schedule", "zero", "offload", "micro_batch", "cuts", "bucket", "global_batch", "precision", "optimizer", "- {name",
         "notes", "step time", "#", "times of", "model:")


def run(command, foretell, folder, scratch):
    words = [word.replace("OUT/", f"{scratch}/") for word in shlex.split(command)]
    done = subprocess.run([foretell, *words[1:]], cwd=folder, capture_output=True, text=True, timeout=300)
    shown = [line.strip() for line in done.stdout.splitlines() if line.strip().startswith(SHOWN)]
    return {"status": done.returncode, "errors": done.stderr.strip(), "shown": " | ".join(shown)[:1200]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--foretell", default="target/debug/foretell", type=pathlib.Path)
    parser.add_argument("--only", action="append", default=[], metavar="PREFIX")
    parser.add_argument("--json", type=pathlib.Path)
    arguments = parser.parse_args()
    results = []
    with open(arguments.folder / "cases.csv", newline="") as cases, tempfile.TemporaryDirectory() as scratch:
        for case in csv.DictReader(cases):
            if arguments.only and not case["id"].startswith(tuple(arguments.only)):
                continue
            result = run(case["command"], arguments.foretell.resolve(), arguments.folder, scratch)
            results.append({"id": case["id"], "expected": case["expected"], "before": case["got"], **result})
            print(f"{case['id']}: {case['class_of_fault']}\n  expected: {case['expected']}\n  before:   {case['got'][:300]}")
            print(f"  now:      status {result['status']}; {result['shown']}")
            for line in result["errors"].splitlines():
                print(f"            {line}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))
    print(f"{len(results)} cases")


if __name__ == "__main__":
    main()
