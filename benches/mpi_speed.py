#!/usr/bin/env python3
"""Times the steps of the same runs over TCP, over shared memory and over MPI on this machine, one after the other, and checks that the losses
are equal.

Needs Open MPI (Debian's openmpi-bin) and a machine that does nothing else.
Usage: cargo build --release && benches/mpi_speed.py [--foretell target/release/foretell] [--rounds 5]
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import tempfile

# Gradients of 1.3 MB and of 36 MB; activations between two stages; tensor shards, which reduce in
# every layer.
MLP = "model: {{family: mlp, widths: [64, {0}, {0}, 10]}}\ntopology: local\nglobal_batch: 32\nlayout: {1}\n"
GPT = "model: {{family: gpt, layers: 2, hidden: 128, heads: 4, vocab: 256, sequence: 64}}\ntopology: local\nglobal_batch: 16\nlayout: {0}\n"
CASES = {
    "mlp 512, data 2": MLP.format(512, "{data: 2, micro_batch: 16}"),
    "mlp 2944, data 2": MLP.format(2944, "{data: 2, micro_batch: 16}"),
    "gpt, pipeline 2": GPT.format("{data: 1, pipeline: 2, micro_batch: 2}"),
    "gpt, tensor 2": GPT.format("{data: 1, tensor: 2, micro_batch: 8}"),
}
MPIRUN = ["mpirun", "-n", "2", "--allow-run-as-root", "--bind-to", "none", "--mca", "btl", "self,vader,tcp", "--mca", "pml", "ob1"]
STEPS = 60


def run(foretell, folder, transport):
    steps = ["--steps", str(STEPS), "--no-evaluation", "--save-every", "never", "--run", f"run-{transport}", "--overwrite", "--json"]
    data = [] if transport == "shared memory" else ["--transport", transport]
    start = MPIRUN if transport == "mpi" else []
    command = [*start, foretell, "execute", "--plan", "plan.yaml", "--data", "text.txt", *steps, *data]
    if "mlp" in (folder / "plan.yaml").read_text():
        command = [word for word in command if word not in ("--data", "text.txt")]
    answer = json.loads(subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout)
    return answer["step_seconds_median"], answer["loss"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--foretell", default="target/release/foretell")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    foretell = str(pathlib.Path(arguments.foretell).resolve())
    transports = ["shared memory", "tcp", "mpi"]
    print("| case | " + " | ".join(transports) + " | MPI over TCP |\n| --- " + "| --- " * (len(transports) + 1) + "|")
    for name, plan in CASES.items():
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            (folder / "plan.yaml").write_text(plan)
            (folder / "text.txt").write_text("abcdefg " * 2000)
            times = {transport: [] for transport in transports}
            losses = set()
            for _ in range(arguments.rounds):
                for transport in transports:
                    seconds, loss = run(foretell, folder, transport)
                    times[transport].append(seconds)
                    losses.add(tuple(loss))
        assert len(losses) == 1, f"{name}: the losses differ"
        medians = [statistics.median(times[transport]) for transport in transports]
        cells = [f"{median * 1e3:.2f} ms ({min(times[one]) * 1e3:.2f} to {max(times[one]) * 1e3:.2f})" for median, one in zip(medians, transports)]
        print(f"| {name} | " + " | ".join(cells) + f" | {medians[2] / medians[1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
