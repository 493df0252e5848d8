#!/usr/bin/env python3
"""Trains as a user would, and checks what survives: a run that is killed, weights of others, lost ranks.

pictures   ResNet-18 over two ranks on a folder of pictures that a script makes. The run is killed (kill -9) halfway and resumed in
           another layout. Its accuracy must be that of a run that was not killed, and torchvision must find the same with its weights.
gpt2       GPT-2 small fine-tuned from weights that transformers saved, in three layouts: losses over 20 steps must be those of a loop
           in transformers, to 1e-3.
kills      Ranks are killed at random moments of runs with --elastic. Each run must end with the loss curve of a run without kills, and
           leave no process, no partial checkpoint and no shared memory behind.
goodput    `simulate --goodput` beside ten runs whose ranks are killed at drawn times.
checkpoints  what one checkpoint in 50 steps costs, and how fast it is written beside `dd` on the same disk.

PyTorch and the like are installed into a virtual environment if it is missing (at FORETELL_VENV or --venv).

Usage: benches/trainer.py [pictures] [gpt2] [kills] [goodput] [checkpoints] [--kills 100] [--foretell PATH]
"""
import argparse
import json
import os
import pathlib
import random
import signal
import struct
import subprocess
import sys
import tempfile
import time

import environment

ROOT = pathlib.Path(__file__).resolve().parent.parent
SIZE, CLASSES = 64, 10


def start(program, folder, *arguments):
    """Starts `foretell execute` in a process group of its own."""
    command = [program, "execute", *map(str, arguments), "--oversubscribe", "--json"]
    return subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def finish(process):
    output, errors = process.communicate()
    if process.returncode != 0:
        sys.exit(f"{' '.join(map(str, process.args))}\n{errors}")
    return json.loads(output)


def steps_in(run):
    """The number of steps that a run has reported so far."""
    file = run / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def wait_for_steps(process, run, steps):
    while steps_in(run) < steps:
        if process.poll() is not None:
            sys.exit(f"the run ended after {steps_in(run)} steps\n{process.stderr.read()}")
        time.sleep(0.02)


def pictures(program, folder, arguments):
    import torch
    import torchvision
    from safetensors.torch import load_file
    made = [sys.executable, ROOT / "benches/make_pictures.py", folder / "pictures", "--train", arguments.pictures, "--val", 400, "--side", 120]
    subprocess.run(list(map(str, made)), check=True)
    plan = lambda layout: (f"model: {{family: resnet, depth: 18, image: {SIZE}, channels: 3, classes: {CLASSES}}}\ntopology: local\n"
                           f"global_batch: 32\nbatch_norm_group: 16\nlayout: {{{layout}}}\n"
                           "training: {learning_rate: 0.02, schedule: {kind: cosine}}\n")
    (folder / "two.yaml").write_text(plan("data: 2, micro_batch: 16"))
    (folder / "one.yaml").write_text(plan("pipeline: 2, micro_batch: 16"))
    basic = ["--plan", "two.yaml", "--data", "pictures", "--epochs", arguments.epochs]
    whole = finish(start(program, folder, *basic, "--run", "whole"))
    steps = whole["steps"]
    killed = start(program, folder, *basic, "--run", "run", "--save-every", max(steps // 10, 1))
    wait_for_steps(killed, folder / "run", steps // 2)
    os.kill(killed.pid, signal.SIGKILL)
    killed.wait()
    resumed = finish(start(program, folder, "--resume", "run", "--plan", "one.yaml"))
    model = torchvision.models.resnet18(num_classes=CLASSES)
    model.load_state_dict(load_file(folder / f"run/checkpoints/{steps}/model.safetensors"), strict=True)
    model.eval()
    transforms = torchvision.transforms
    fit = transforms.Compose([transforms.Resize(SIZE * 256 // 224), transforms.CenterCrop(SIZE), transforms.ToTensor(),
                              transforms.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])])
    data = torchvision.datasets.ImageFolder(folder / "pictures/val", fit)
    right = 0
    with torch.no_grad():
        for images, labels in torch.utils.data.DataLoader(data, batch_size=50):
            right += (model(images).argmax(1) == labels).sum().item()
    top1 = {"uninterrupted": whole["evaluation"]["top1"], "killed and resumed": resumed["evaluation"]["top1"], "in torchvision": right / len(data)}
    print(f"pictures: {arguments.pictures} pictures, {steps} steps, killed after {steps // 2}, resumed from step {resumed['resumed_from_step']} in a pipeline")
    print("  " + ", ".join(f"{what} {100 * share:.2f} %" for what, share in top1.items()))
    # One picture of 400 is 0.25 %: decoders round pixels differently.
    if abs(top1["killed and resumed"] - top1["in torchvision"]) > 1.5 / len(data):
        sys.exit("torchvision finds another top-1")
    if abs(top1["killed and resumed"] - top1["uninterrupted"]) > 0.03:
        sys.exit("the resumed run has another accuracy")


def gpt2(program, folder, arguments):
    import torch
    import transformers
    sequence, batch, steps, rate = 32, 4, 20, 1e-4
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_positions=sequence, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, attn_implementation="eager")
    model = transformers.GPT2LMHeadModel(config)
    model.save_pretrained(folder / "weights")
    tokens = torch.randint(config.vocab_size, (sequence + batch + sequence + 1,))
    (folder / "tokens.bin").write_bytes(struct.pack(f"<{len(tokens)}H", *tokens.tolist()))
    window = lambda start: tokens[start:start + sequence]
    inputs, labels = [torch.stack([window(first + shift) for first in range(batch)]) for shift in (0, 1)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    theirs = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
        theirs.append(loss.item())
    print(f"gpt2: 124 million parameters, sequence {sequence}, batch {batch}; loss {theirs[0]:.4f} to {theirs[-1]:.4f} in transformers")
    for layout in ["micro_batch: 4", "data: 2, micro_batch: 2, zero: 1", "pipeline: 2, micro_batch: 2"]:
        plan = (f"model: {{family: gpt, layers: 12, hidden: 768, heads: 12, vocab: 50257, sequence: {sequence}}}\ntopology: local\nglobal_batch: {batch}\n"
                f"layout: {{{layout}}}\noptimizer: adamw\ntraining: {{learning_rate: {rate}, weight_decay: 0.01}}\n")
        (folder / "plan.yaml").write_text(plan)
        more = ["--data", "tokens.bin", "--steps", steps, "--no-evaluation", "--save-every", "never", "--run", layout.split(":")[0], "--overwrite"]
        ours = finish(start(program, folder, "--plan", "plan.yaml", "--init", "weights", *more))["loss"]
        worst = max(abs(one - other) / other for one, other in zip(ours, theirs))
        print(f"  {layout}: largest relative difference over {steps} steps {worst:.1e}")
        if worst > 1e-3:
            sys.exit("the losses differ")


def segments():
    return set(os.listdir("/dev/shm"))


def kills(program, folder, arguments):
    """Kills one of the ranks at a random moment, again and again."""
    drawn = random.Random(arguments.seed)
    (folder / "plan.yaml").write_text("model: {family: mlp, widths: [64, 256, 128, 10]}\ntopology: local\nglobal_batch: 64\n"
                                      "layout: {data: 2}\noptimizer: adamw\ntraining: {learning_rate: 0.0003}\n")
    basic = ["--plan", "plan.yaml", "--data", "digits", "--no-evaluation", "--steps", arguments.steps]
    whole = finish(start(program, folder, *basic, "--run", "whole", "--save-every", "never"))
    before, done, runs, restarts, worst = segments(), 0, 0, 0, 0.0
    while done < arguments.kills:
        run = folder / f"run{runs}"
        process = start(program, folder, *basic, "--run", run.name, "--save-every", 50, "--keep", 2, "--elastic", "--max-restarts", 1000)
        wanted = min(arguments.kills - done, drawn.randint(3, 8))
        left = wanted
        while left > 0 and process.poll() is None:
            time.sleep(drawn.uniform(0.05, 1.5))
            try:
                ids = [int(one) for one in (run / "ranks/pids").read_text().split()]
                os.kill(drawn.choice(ids), signal.SIGKILL)
                left -= 1
            except (FileNotFoundError, ProcessLookupError, IndexError):
                pass
        document = finish(process)
        lines = {line["step"]: line["loss"] for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}
        curve = [lines[step] for step in range(arguments.steps)]
        worst = max(worst, *(abs(one - other) / max(other, 1e-3) for one, other in zip(curve, whole["loss"])))
        partial = [entry.name for entry in (run / "checkpoints").iterdir() if entry.name.startswith(".")]
        alive = [one for one in (run / "ranks/pids").read_text().split() if pathlib.Path(f"/proc/{one}").exists()]
        if partial or alive or worst > 1e-2:
            sys.exit(f"{run}: partial checkpoints {partial}, processes {alive}, loss apart by {worst:.1e}")
        done, runs, restarts = done + wanted - left, runs + 1, restarts + document["restarts"]
    if left_behind := segments() - before:
        sys.exit(f"shared memory is left behind: {left_behind}")
    print(f"kills: {done} kills in {runs} runs of {arguments.steps} steps, {restarts} restarts; every run ended, losses at most {worst:.1e} apart")


def run_and_kill(program, folder, arguments, name, between, drawn):
    """Runs with a checkpoint each 100 steps and kills a rank whenever a drawn time between failures has passed. Returns the seconds of
    the run, the number of kills, and for each the seconds from the kill until the next step is reported."""
    run, kills_made, restarts = folder / name, 0, []
    started = time.perf_counter()
    process = start(program, folder, *arguments, "--run", name, "--save-every", 100, "--keep", 2, "--max-restarts", 1000)
    wait_for_steps(process, run, 1)
    next_kill = time.perf_counter() + between(drawn)
    killed_at, known = None, set()
    while process.poll() is None:
        time.sleep(0.005)
        ids = (run / "ranks/pids").read_text().split()
        if killed_at and set(ids) != known and steps_in(run) > steps:
            restarts.append(time.perf_counter() - killed_at)
            killed_at = None
        steps = steps_in(run)
        if time.perf_counter() >= next_kill:
            next_kill = time.perf_counter() + between(drawn)
            try:
                os.kill(int(drawn.choice(ids)), signal.SIGKILL)
                kills_made, killed_at, known = kills_made + 1, time.perf_counter(), set(ids)
            except (ProcessLookupError, ValueError):
                pass
    seconds = time.perf_counter() - started
    finish(process)
    return seconds, kills_made, restarts


def goodput(program, folder, arguments):
    """Compares the goodput that `simulate --goodput` predicts with that of ten runs whose ranks are killed at drawn times."""
    mean, steps = 6.0, 4000
    topology = lambda restart: (
        "name: host\ndevices:\n  core: {base: cpu-core}\nnodes:\n- {name: host, count: 1, devices: {kind: core, count: 2}, "
        f"link: shared-memory, mean_time_between_failures: {mean}s}}\nstorage: {{bandwidth: 500MB/s}}\nrestart_time: {restart:.3f}s\n")
    (folder / "host.yaml").write_text(topology(1))
    (folder / "plan.yaml").write_text("model: {family: mlp, widths: [64, 512, 512, 10]}\ntopology: host.yaml\nglobal_batch: 64\n"
                                      "layout: {data: 2, micro_batch: 32}\noptimizer: adamw\n")
    basic = ["--plan", "plan.yaml", "--data", "digits", "--no-evaluation", "--steps", steps]
    began = time.perf_counter()
    whole = finish(start(program, folder, *basic, "--run", "whole", "--save-every", 100, "--keep", 2))
    training = sum(whole["step_seconds"])
    starting = time.perf_counter() - began - training
    drawn = random.Random(arguments.seed)
    _, _, restarts = run_and_kill(program, folder, basic, "probe", lambda random_: 2.0, drawn)
    restart = sum(restarts) / len(restarts)
    (folder / "host.yaml").write_text(topology(restart))
    # The step time is that of the run without failures: this is about failures, not about steps.
    every = round(100 * training / steps / predicted_step(program, folder))
    command = [program, "simulate", "--plan", "plan.yaml", "--goodput", "--checkpoint-every", str(max(every, 1)), "--json"]
    answer = json.loads(subprocess.run(list(map(str, command)), cwd=folder, check=True, capture_output=True, text=True).stdout)
    predicted = answer["goodput"]["goodput"]
    measured, kills_made = [], 0
    for number in range(10):
        seconds, made, _ = run_and_kill(program, folder, basic, f"run{number}", lambda random_: random_.expovariate(1 / mean), drawn)
        measured.append(training / (seconds - starting))
        kills_made += made
    average = len(measured) / sum(1 / share for share in measured)
    print(f"goodput: {training:.1f} s of training, a failure each {mean} s, a restart takes {restart:.2f} s; predicted {100 * predicted:.1f} %, "
          f"over ten runs with {kills_made} kills {100 * average:.1f} % ({100 * (predicted / average - 1):+.1f} %)")
    print("  runs: " + ", ".join(f"{100 * share:.0f} %" for share in measured))


def predicted_step(program, folder):
    command = list(map(str, [program, "simulate", "--plan", "plan.yaml", "--json"]))
    return json.loads(subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout)["step_seconds"]


def checkpoints(program, folder, arguments):
    """Measures what one checkpoint in 50 steps costs, and how fast it is written beside `dd` on the same disk."""
    (folder / "plan.yaml").write_text("model: {family: gpt, layers: 4, hidden: 256, heads: 4, vocab: 8192, sequence: 64}\ntopology: local\n"
                                      "global_batch: 8\nlayout: {data: 2, micro_batch: 4}\noptimizer: adamw\n")
    times = {"50": [], "never": []}
    for round_ in range(3):
        for every, measured in times.items():
            more = ["--steps", 200, "--no-evaluation", "--data", "synthetic", "--save-every", every, "--keep", 1, "--run", f"{every}-{round_}"]
            measured += finish(start(program, folder, "--plan", "plan.yaml", *more))["step_seconds"][1:]
    mean = {every: sum(measured) / len(measured) for every, measured in times.items()}
    rates, copies = [], []
    for log in folder.glob("50-*/ranks/*.log"):
        for line in log.read_text().splitlines():
            if line.startswith("checkpoint "):
                words = line.split()
                copies.append(float(words[6]))
                rates.append((int(words[2]), float(words[10])))
    size = sum(size for size, _ in rates) // len(rates)
    dd = []
    for _ in range(5):
        started = time.perf_counter()
        command = ["dd", "if=/dev/zero", f"of={folder}/dd", f"bs={4 << 20}", f"count={max(2 * size // (4 << 20), 1)}", "conv=fsync"]
        subprocess.run(command, check=True, capture_output=True)
        dd.append(max(2 * size // (4 << 20), 1) * (4 << 20) / (time.perf_counter() - started))
    ours = sorted(2 * size / seconds for size, seconds in rates)[len(rates) // 2]
    theirs = sorted(dd)[len(dd) // 2]
    print(f"checkpoints: {2 * size / 1e6:.0f} MB each; a step takes {1e3 * mean['never']:.2f} ms, with one checkpoint in 50 steps {1e3 * mean['50']:.2f} ms "
          f"({100 * (mean['50'] / mean['never'] - 1):+.1f} %), of which the copy {1e3 * sorted(copies)[len(copies) // 2]:.2f} ms")
    print(f"  written by both ranks together at {ours / 1e6:.0f} MB/s, by dd with fsync at {theirs / 1e6:.0f} MB/s: {ours / theirs:.2f} of it")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"pictures": pictures, "gpt2": gpt2, "kills": kills, "goodput": goodput, "checkpoints": checkpoints}
    parser.add_argument("parts", nargs="*", choices=[*parts, []])
    for name, default in (("pictures", 2000), ("epochs", 3), ("kills", 100), ("steps", 3000), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--foretell", type=pathlib.Path, default=ROOT / "target/release/foretell")
    environment.add_argument(parser)
    arguments = parser.parse_args()
    environment.enter(arguments.venv)
    for part in arguments.parts or parts:
        with tempfile.TemporaryDirectory() as folder:
            parts[part](arguments.foretell.resolve(), pathlib.Path(folder), arguments)


if __name__ == "__main__":
    main()
