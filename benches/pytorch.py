#!/usr/bin/env python3
"""Trains the same models with PyTorch and with Foretell on the same cores, and prints both times and their ratio.

PyTorch is installed from PyPI into a virtual environment, which is made if it is missing (at FORETELL_VENV or --venv). For each case
three sides take turns, so that changes in the machine's speed affect all equally: PyTorch with its stock settings, PyTorch with the best
documented settings (channels-last convolutions, fused optimizer, gradients as views of DDP's buckets, an allocator that keeps its
memory), and Foretell. The ratio is Foretell's median step over that of the faster PyTorch.

Usage: benches/pytorch.py [--cases NAME...] [--ranks 1 2] [--rounds N] [--seconds S] [--precision fp32|bf16]
       [--update docs/reference/training-speed.md]
"""
import argparse
import datetime
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile

import environment as environment_of_benches

ROOT = pathlib.Path(__file__).resolve().parent.parent
REAL_TIME = False
SIZES = [1 << exponent for exponent in range(10, 29, 2)]


def resnet(depth, image, stem, classes):
    return {"family": "resnet", "depth": depth, "stem": stem, "image": image, "channels": 3, "classes": classes}


def transformer(family, layers, hidden, heads, vocab, sequence):
    return {"family": family, "layers": layers, "hidden": hidden, "heads": heads, "vocab": vocab, "sequence": sequence}


CASES = {
    "mlp": ("MLP 784-512-512-10, batch 128, SGD", 128, "sgd", {"family": "mlp", "widths": [784, 512, 512, 10]}),
    "resnet50": ("ResNet-50, 224x224, batch 8, SGD", 8, "sgd", resnet(50, 224, "imagenet", 1000)),
    "resnet18": ("ResNet-18, 32x32, CIFAR stem, batch 64, SGD", 64, "sgd", resnet(18, 32, "small", 10)),
    "resnet18-imagenet": ("ResNet-18, 32x32, ImageNet stem, batch 64, SGD", 64, "sgd", resnet(18, 32, "imagenet", 10)),
    "gpt2": ("GPT-2 small, sequence 256, batch 2, AdamW", 2, "adamw", transformer("gpt", 12, 768, 12, 50257, 256)),
    "gpt": ("GPT 4 layers of 256, sequence 128, vocabulary 8192, batch 8, AdamW", 8, "adamw", transformer("gpt", 4, 256, 4, 8192, 128)),
    "bert": ("BERT-base, sequence 128, batch 4, AdamW", 4, "adamw", transformer("bert", 12, 768, 12, 30522, 128)),
}


# Makes glibc keep freed memory. Returning it to the system costs a page fault for every page of
# every activation.
KEEP_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(4 << 30), "MALLOC_TRIM_THRESHOLD_": str(16 << 30), "MALLOC_TOP_PAD_": str(1 << 30)}


def environment(variant=None):
    """Returns the environment of a side: one thread, and for the tuned PyTorch an allocator that keeps its memory."""
    kept = KEEP_MEMORY if variant == "tuned" else {}
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **kept}


def scheduled(command):
    """Returns the command, with real-time priority if `--real-time` is given."""
    return [*(["chrt", "--rr", "20"] if REAL_TIME else []), *command]


def fail(done):
    sys.exit(f"{' '.join(map(str, done.args))}\n{done.stderr}")


def build():
    command = ["cargo", "build", "--release", "--message-format", "json-render-diagnostics", "--quiet",
               "--package", "foretell", "--bin", "foretell", "--package", "foretell-executor", "--example", "all_reduce"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit("Foretell cannot be built")
    messages = map(json.loads, done.stdout.splitlines())
    return {message["target"]["name"]: message["executable"] for message in messages if message.get("executable")}


class PyTorch:
    """The ranks of one PyTorch side: warmed-up processes that wait for a number of steps."""

    def __init__(self, python, scratch, case, variant, ranks, precision):
        meeting = scratch / f"meeting-{variant}-{ranks}-{datetime.datetime.now().timestamp()}"
        command = [python, ROOT / "benches/pytorch_worker.py", "--case", json.dumps(case), "--variant", variant,
                   "--precision", precision, "--ranks", str(ranks), "--meeting", meeting]
        self.ranks = [subprocess.Popen(scheduled([*command, "--rank", str(rank)]), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       text=True, env=environment(variant)) for rank in range(ranks)]
        self.version = [self.answer(rank) for rank in self.ranks][0]["torch"]

    @staticmethod
    def answer(rank):
        line = rank.stdout.readline()
        if not line:
            sys.exit("PyTorch ended early; see its messages above")
        return json.loads(line)

    def run(self, count):
        for rank in self.ranks:
            rank.stdin.write(f"{count}\n")
            rank.stdin.flush()
        return [self.answer(rank) for rank in self.ranks][0]["seconds"]

    def close(self):
        for rank in self.ranks:
            rank.stdin.close()
        for rank in self.ranks:
            rank.wait()


class Foretell:
    """The Foretell side: each turn is a run of `foretell execute`."""

    def __init__(self, program, scratch, name, batch, optimizer, model, ranks, precision):
        self.program, self.scratch, self.rounds = program, scratch, 0
        self.plan = scratch / f"{name}-{ranks}.plan.yaml"
        # JSON is valid YAML.
        self.plan.write_text(json.dumps({
            "model": model,
            "topology": "local", "global_batch": batch, "precision": precision, "optimizer": optimizer,
            "layout": {"data": ranks, "micro_batch": batch // ranks},
            "training": {"momentum": 0.9 if optimizer == "sgd" else 0.0, "learning_rate": 1e-3 if optimizer == "sgd" else 1e-4},
        }))

    def run(self, count):
        self.rounds += 1
        folder = self.scratch / f"{self.plan.stem}-{self.rounds}.run"
        # The first two steps warm up, as in PyTorch's processes.
        command = [self.program, "execute", "--plan", self.plan, "--steps", str(count + 2), "--data", "synthetic", "--no-evaluation",
                   "--run", folder, "--json"]
        done = subprocess.run(scheduled(command), capture_output=True, text=True, env=environment())
        if done.returncode != 0:
            raise RuntimeError(done.stderr.strip())
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["seconds"] for line in lines][2:]


def milliseconds(seconds):
    median = 1e3 * statistics.median(seconds)
    return f"{median:.2f}" if median < 100 else f"{median:.0f}"


def train(options, programs, python, scratch, name, ranks):
    """Returns a row of the table, or the reason why the case is skipped."""
    title, batch, optimizer, model = CASES[name]
    foretell = Foretell(programs["foretell"], scratch, name, batch, optimizer, model, ranks, options.precision)
    try:
        foretell.run(1)
    except RuntimeError as error:
        return {"case": title, "ranks": ranks, "skipped": re.sub(r"^error\[\S+\]: (\S+: )?", "", str(error).splitlines()[0])}
    case = {"model": model, "batch": batch, "optimizer": optimizer}
    sides = {variant: PyTorch(python, scratch, case, variant, ranks, options.precision) for variant in ("stock", "tuned")}
    version = sides["stock"].version
    sides["foretell"] = foretell
    seconds = {side: [] for side in sides}
    once = sides["tuned"].run(2)
    count = max(3, min(200, round(options.seconds / min(once))))
    for _ in range(options.rounds):
        for side, runner in sides.items():
            seconds[side] += runner.run(count)
    for side in ("stock", "tuned"):
        sides[side].close()
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    least = {side: min(values) for side, values in seconds.items()}
    better = min(("stock", "tuned"), key=medians.get)
    return {"case": title, "ranks": ranks, "torch": version, "better": better, "seconds": seconds,
            "ratio": medians["foretell"] / medians[better], "ratio_of_least": least["foretell"] / min(least["stock"], least["tuned"])}


def all_reduce(options, programs, python, scratch):
    gloo = PyTorch(python, scratch, SIZES, "all-reduce", 2, "fp32")
    seconds = {side: {size: [] for size in SIZES} for side in ("gloo", "foretell")}
    for _ in range(options.rounds):
        command = scheduled([programs["all_reduce"], "20", *map(str, SIZES)])
        ours = subprocess.run(command, capture_output=True, text=True, env=environment())
        if ours.returncode != 0:
            fail(ours)
        for side, values in (("gloo", gloo.run(20)), ("foretell", json.loads(ours.stdout))):
            for size in SIZES:
                seconds[side][size] += values[str(size)]
    gloo.close()
    return seconds


def size_text(size):
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def machine():
    facts = dict(re.findall(r"^(.*?):\s+(.*)$", subprocess.run(["lscpu"], capture_output=True, text=True).stdout, re.MULTILINE))
    vector = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if flag in facts.get("Flags", "").split()]
    memory = next(line.split()[1] for line in open("/proc/meminfo") if line.startswith("MemTotal"))
    return (f"{facts.get('CPU(s)')} cores of {facts.get('Model name')} (family {facts.get('CPU family')}, model {facts.get('Model')}; "
            f"{', '.join(vector)}; caches {facts.get('L1d cache')}, {facts.get('L2 cache')}, {facts.get('L3 cache')}), "
            f"{int(memory) >> 20} GiB, Linux {os.uname().release}")


def markdown(rows, reductions, options):
    versions = {row["torch"] for row in rows if "torch" in row}
    yield f"Command: `{' '.join(['benches/pytorch.py', *options.shown])}` ({datetime.date.today():%-d %B %Y}).  "
    yield f"Machine: {machine()}; PyTorch {', '.join(sorted(versions)) or 'of the same environment'}; {options.precision}.\n"
    if rows:
        yield "| case | ranks | PyTorch stock (ms) | PyTorch tuned (ms) | Foretell (ms) | ratio of medians | ratio of least |"
        yield "| --- | --- | --- | --- | --- | --- | --- |"
    for row in rows:
        if "skipped" not in row:
            times = " | ".join(milliseconds(row["seconds"][side]) for side in ("stock", "tuned", "foretell"))
            yield f"| {row['case']} | {row['ranks']} | {times} | {row['ratio']:.2f} | {row['ratio_of_least']:.2f} |"
    for row in rows:
        if "skipped" in row:
            yield f"\n{row['case']}, {row['ranks']} ranks: skipped: {row['skipped']}"
    if reductions:
        yield "\n| all-reduce of two processes | gloo (us) | Foretell (us) | Foretell (GB/s) | ratio of medians |"
        yield "| --- | --- | --- | --- | --- |"
        for size in SIZES:
            gloo, ours = (statistics.median(reductions[side][size]) for side in ("gloo", "foretell"))
            yield f"| {size_text(size)} | {1e6 * gloo:.1f} | {1e6 * ours:.1f} | {size / ours / 1e9:.2f} | {ours / gloo:.3f} |"


def replace_part(path, precision, text):
    """Replaces the text between the two marker comments in a document."""
    begin, end = (f"<!-- benches/pytorch.py {precision}: {word} -->" for word in ("begin", "end"))
    document = path.read_text()
    if begin not in document or end not in document:
        sys.exit(f"{path} does not have the lines `{begin}` and `{end}`")
    path.write_text(document[:document.index(begin) + len(begin)] + "\n" + text + "\n" + document[document.index(end):])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=[*CASES, "all-reduce"], choices=[*CASES, "all-reduce"], metavar="NAME",
                        help=f"of {', '.join([*CASES, 'all-reduce'])}")
    parser.add_argument("--ranks", nargs="*", type=int, default=[1, 2], choices=[1, 2])
    parser.add_argument("--rounds", type=int, default=5, help="number of turns of each side")
    parser.add_argument("--seconds", type=float, default=3.0, help="approximate length of a turn")
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16", "fp16"])
    environment_of_benches.add_argument(parser)
    parser.add_argument("--foretell", help="use this program instead of building it (all-reduce is built anyway)")
    parser.add_argument("--real-time", action="store_true", help="run all sides with real-time priority (`chrt --rr`; needs root)")
    parser.add_argument("--json", type=pathlib.Path, help="write every step's time here")
    parser.add_argument("--update", type=pathlib.Path, help="write the tables into this document, between its marker comments")
    options = parser.parse_args()
    global REAL_TIME
    REAL_TIME = options.real_time
    options.shown = [word for word in sys.argv[1:] if word]
    python = environment_of_benches.python_of(options.venv)
    programs = {"foretell": options.foretell} if options.foretell and "all-reduce" not in options.cases else build()
    if options.foretell:
        programs["foretell"] = options.foretell
    rows, reductions = [], None
    with tempfile.TemporaryDirectory() as scratch:
        scratch = pathlib.Path(scratch)
        for name in options.cases:
            for ranks in options.ranks if name in CASES else []:
                rows.append(train(options, programs, python, scratch, name, ranks))
                print(list(markdown(rows[-1:], None, options))[-1].strip(), file=sys.stderr, flush=True)
        if "all-reduce" in options.cases:
            reductions = all_reduce(options, programs, python, scratch)
    text = "\n".join(markdown(rows, reductions, options))
    print(text)
    if options.json:
        options.json.write_text(json.dumps({"training": rows, "all_reduce": reductions}))
    if options.update:
        replace_part(options.update, options.precision, text)


if __name__ == "__main__":
    main()
