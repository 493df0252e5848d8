#!/usr/bin/env python3
"""Trains in modes with PyTorch and with Foretell on the same cores, in turns, and prints the times of a step and their ratio.

- Local SGD: DistributedDataParallel over gloo on two ranks, each on its own core, with `post_localSGD_hook` and
  `PostLocalSGDOptimizer`. The tuned side has a fused optimizer, gradients as views of DDP's buckets, an allocator that keeps its
  memory, and no gradient all-reduce at all (`post_local_gradient_allreduce=False`); the stock side all-reduces in groups of one rank.
- Parameter servers, by `torch.distributed.rpc` over TensorPipe: one process is the server, one or two are workers.
  `batch`: PyTorch's tutorial "Implementing Batch RPC Processing Using Asynchronous Executions": workers push gradients, and get the
  model back once as many have pushed as an update takes (all: staleness 0; one: unbounded).
  `flat`: the same with one tensor of all gradients and one of all parameters in place of a list and a module, a fused optimizer and
  an allocator that keeps its memory.
  `autograd`: PyTorch's tutorial "Implementing a Parameter Server Using Distributed RPC Framework": the server has the model and runs
  it, a worker has samples and losses, with `dist_autograd` and `DistributedOptimizer`. For one worker only: with two, PyTorch 2.15
  ends with an error, since one updates parameters that the other's backward pass has yet to read.
Each process has one thread to compute with. Those of RPC are not pinned to cores. Two workers and a server share two cores, on both
sides. A time is that of all workers' steps, divided by their number: the median over turns. The ratio is Foretell's over that of the
fastest PyTorch.

Usage: benches/modes_pytorch.py [--cases NAME...] [--modes NAME...] [--rounds N] [--seconds S]
"""
import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile

import environment as environment_of_benches
import pytorch

WORKER = pytorch.ROOT / "benches/modes_pytorch_worker.py"
# The steps of a round.
EVERY = 10
# name: (workers, servers, the plan's mode, PyTorch's variants, pushes of an update)
MODES = {
    "local SGD, 10": (2, 0, {"local_sgd": {"every": EVERY}}, ["stock", "tuned"], 0),
    "server, 1 worker": (1, 1, {"parameter_server": {"servers": 1}}, ["batch", "flat", "autograd"], 1),
    "server, 2 workers, staleness 0": (2, 1, {"parameter_server": {"servers": 1}}, ["batch", "flat"], 2),
    "server, 2 workers, unbounded": (2, 1, {"parameter_server": {"servers": 1, "staleness": "unbounded"}}, ["batch", "flat"], 1),
}


class PyTorch:
    """The processes of one PyTorch side, which wait for a number of steps. A server is the first of them."""

    def __init__(self, python, scratch, case, mode, variant):
        workers, servers, _, _, pushes = MODES[mode]
        meeting = scratch / f"meeting-{len(list(scratch.iterdir()))}"
        meeting.touch()
        os.unlink(meeting)
        command = [python, WORKER, "--case", json.dumps(case), "--variant", variant, "--workers", str(workers), "--pushes", str(pushes),
                   "--every", str(EVERY), "--meeting", meeting]
        which = "tuned" if variant in ("tuned", "flat") else "stock"
        self.ranks = [subprocess.Popen(pytorch.scheduled([*command, "--rank", str(rank)]), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                       text=True, env=pytorch.environment(which)) for rank in range(workers + servers)]
        self.version = self.answers()[0]["torch"]

    def answers(self):
        return [pytorch.PyTorch.answer(rank) for rank in self.ranks]

    def run(self, count):
        """The seconds of a step, over as many steps of each worker."""
        for rank in self.ranks:
            rank.stdin.write(f"{count}\n")
            rank.stdin.flush()
        return max(answer["seconds"] for answer in self.answers()) / count

    def close(self):
        for rank in self.ranks:
            rank.stdin.close()
        for rank in self.ranks:
            rank.wait()


class Foretell(pytorch.Foretell):
    """The Foretell side: each turn is a run of `foretell execute`."""

    def __init__(self, program, scratch, name, mode):
        workers, _, mode_of_plan, _, _ = MODES[mode]
        _, batch, optimizer, model = pytorch.CASES[name]
        super().__init__(program, scratch, f"{name}-{list(MODES).index(mode)}", batch, optimizer, model, workers, "fp32")
        self.plan.write_text(json.dumps({**json.loads(self.plan.read_text()), "mode": mode_of_plan}))

    def run(self, count):
        """The seconds of a step. The first round warms up, as in PyTorch's processes."""
        self.rounds += 1
        folder = self.scratch / f"{self.plan.stem}-{self.rounds}.run"
        command = [self.program, "execute", "--plan", self.plan, "--steps", str(count + EVERY), "--data", "synthetic", "--no-evaluation",
                   "--save-every", "never", "--oversubscribe", "--run", folder, "--json"]
        done = subprocess.run(pytorch.scheduled(command), capture_output=True, text=True, env=pytorch.environment())
        if done.returncode != 0:
            raise RuntimeError(json.loads(done.stdout)["error"]["message"] if done.stdout else done.stderr.strip())
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        return statistics.mean(json.loads(line)["seconds"] for line in lines[EVERY:])


def train(options, program, python, scratch, name, mode):
    """A row of the table."""
    title, batch, optimizer, model = pytorch.CASES[name]
    workers, _, _, variants, _ = MODES[mode]
    foretell = Foretell(program, scratch, name, mode)
    try:
        foretell.run(EVERY)
    except RuntimeError as error:
        return f"| {title} | {mode} | | | skipped: {str(error).splitlines()[0]} |"
    case = {"model": model, "batch": batch, "optimizer": optimizer}
    sides = {variant: PyTorch(python, scratch, case, mode, variant) for variant in variants}
    options.version = next(iter(sides.values())).version
    sides["foretell"] = foretell
    seconds = {side: [] for side in sides}
    once = min(sides[variant].run(EVERY) for variant in variants)
    count = EVERY * max(1, min(100, round(options.seconds / once / EVERY)))
    for _ in range(options.rounds):
        for side, runner in sides.items():
            seconds[side].append(runner.run(count))
    for variant in variants:
        sides[variant].close()
    medians = {side: statistics.median(values) for side, values in seconds.items()}
    theirs = ", ".join(f"{variant} {pytorch.milliseconds(seconds[variant])}" for variant in variants)
    ratios = [ours / min(seconds[variant][turn] for variant in variants) for turn, ours in enumerate(seconds["foretell"])]
    ratio = medians["foretell"] / min(medians[variant] for variant in variants)
    return (f"| {title} | {mode} | {theirs} | {pytorch.milliseconds(seconds['foretell'])} | {ratio:.2f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}) |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=["mlp", "gpt"], choices=list(pytorch.CASES), metavar="NAME",
                        help=f"of {', '.join(pytorch.CASES)}")
    parser.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES), metavar="NAME", help=f"of {'; '.join(MODES)}")
    parser.add_argument("--rounds", type=int, default=5, help="number of turns of each side")
    parser.add_argument("--seconds", type=float, default=3.0, help="approximate length of a turn")
    environment_of_benches.add_argument(parser)
    parser.add_argument("--foretell", help="use this program instead of building it")
    options = parser.parse_args()
    python = environment_of_benches.python_of(options.venv)
    program = options.foretell or pytorch.build()["foretell"]
    with tempfile.TemporaryDirectory() as scratch:
        print("| case | mode | PyTorch (ms) | Foretell (ms) | ratio of medians (of single turns) |\n| --- | --- | --- | --- | --- |")
        for name in options.cases:
            for mode in options.modes:
                print(train(options, program, python, pathlib.Path(scratch), name, mode), flush=True)
    print(f"\nMachine: {pytorch.machine()}; PyTorch {getattr(options, 'version', 'not run')}; fp32.")


if __name__ == "__main__":
    main()
