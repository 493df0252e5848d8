#!/usr/bin/env python3
"""Trains as a user would, and checks what survives and what it costs. Each part prints a table; --json FILE keeps the figures.

pictures     ResNet-18 over two ranks on a folder of pictures that a script makes. The run is killed (kill -9) halfway and resumed in
             another layout. Its accuracy must be that of a run that was not killed, and torchvision must find the same with its weights.
gpt2         GPT-2 small fine-tuned from weights that transformers saved, in three layouts: losses over 20 steps must be those of a loop
             in transformers, to 1e-3.
kills        Ranks are killed at random moments of runs with --elastic, on this machine or in a lab (--lab). Each run must end with the
             loss curve of a run without kills, and leave no process, no partial checkpoint, no shared memory and no namespace behind.
goodput      Runs whose ranks are killed at drawn times: the time that a failure costs, beside what `simulate --goodput` predicts.
checkpoints  How fast checkpoints are written beside a plain sequential write to the same disk, and how much one in 50 steps slows a step.
resume       GPT-2 small, resumed in another layout: the seconds until its first step begins.

Only `pictures` and `gpt2` need more than Python 3: PyTorch and the like, which are installed into a virtual environment if it is missing
(at FORETELL_VENV or --venv). Speeds need a machine that does nothing else.

Usage: benches/trainer.py kills --kills 100 | goodput | checkpoints | resume | pictures | gpt2 [--foretell PATH] [--json FILE]
"""
import argparse
import atexit
import json
import os
import pathlib
import random
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time

import environment

ROOT = pathlib.Path(__file__).resolve().parent.parent
SIZE, CLASSES = 64, 10


def start(program, folder, *arguments):
    """Starts `foretell execute` in a process group of its own. It writes to files: a pipe that nobody reads would stop it at its end."""
    command = [program, "execute", *map(str, arguments), "--oversubscribe", "--json"]
    output, errors = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
    process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=errors, start_new_session=True)
    process.written = (output, errors)
    # Ranks end with their launcher.
    atexit.register(process.kill)
    return process


def finish(process):
    process.wait()
    output, errors = process.written
    for file in process.written:
        file.seek(0)
    if process.returncode != 0:
        sys.exit(f"{' '.join(map(str, process.args))}\n{errors.read()}")
    return json.loads(output.read())


def ask(program, folder, *arguments):
    """Runs another command of `foretell` and returns its document."""
    done = subprocess.run([program, *map(str, arguments), "--json"], cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, done.args))}\n{done.stderr}")
    return json.loads(done.stdout)


def steps_in(run):
    """The number of steps that a run has reported so far."""
    file = run / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def wait_for_steps(process, run, steps):
    while steps_in(run) < steps:
        if process.poll() is not None:
            finish(process)
            sys.exit(f"the run ended after {steps_in(run)} steps")
        time.sleep(0.005)


def ranks_of(process):
    """The processes of a run's ranks: children of the launcher that have a rank in their environment."""
    def is_rank(pid):
        try:
            return b"\0FORETELL_RANK=" in b"\0" + pathlib.Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
    try:
        tasks = [task.read_text().split() for task in pathlib.Path(f"/proc/{process.pid}/task").glob("*/children")]
    except OSError:
        return []
    return [int(pid) for pids in tasks for pid in pids if is_rank(pid)]


def kill_one(process, drawn):
    """Kills one rank of a run. Returns whether there was one."""
    ranks = sorted(ranks_of(process))
    try:
        os.kill(drawn.choice(ranks), signal.SIGKILL)
        return True
    except (ProcessLookupError, IndexError):
        return False


def table(title, rows):
    """Prints rows of a name and a value."""
    width = max(len(name) for name, _ in rows)
    print(f"\n{title}")
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")


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
    table(f"pictures: {arguments.pictures} pictures, {steps} steps, killed after {steps // 2}, resumed from step {resumed['resumed_from_step']} in a pipeline",
          [(what, f"{100 * share:.2f} %") for what, share in top1.items()])
    # One picture of 400 is 0.25 %: decoders round pixels differently.
    if abs(top1["killed and resumed"] - top1["in torchvision"]) > 1.5 / len(data):
        sys.exit("torchvision finds another top-1")
    if abs(top1["killed and resumed"] - top1["uninterrupted"]) > 0.03:
        sys.exit("the resumed run has another accuracy")
    return {"top1": top1, "steps": steps, "resumed_from_step": resumed["resumed_from_step"]}


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
    found = {}
    for layout in ["micro_batch: 4", "data: 2, micro_batch: 2, zero: 1", "pipeline: 2, micro_batch: 2"]:
        (folder / "plan.yaml").write_text(f"{GPT2}sequence: {sequence}}}\ntopology: local\nglobal_batch: {batch}\nlayout: {{{layout}}}\noptimizer: adamw\n"
                                          f"training: {{learning_rate: {rate}, weight_decay: 0.01}}\n")
        more = ["--data", "tokens.bin", "--steps", steps, "--no-evaluation", "--save-every", "never", "--run", layout.split(":")[0], "--overwrite"]
        ours = finish(start(program, folder, "--plan", "plan.yaml", "--init", "weights", *more))["loss"]
        found[layout] = max(abs(one - other) / other for one, other in zip(ours, theirs))
    table(f"gpt2: 124 million parameters, sequence {sequence}, batch {batch}; loss {theirs[0]:.4f} to {theirs[-1]:.4f} in transformers",
          [(layout, f"largest relative difference over {steps} steps {worst:.1e}") for layout, worst in found.items()])
    if max(found.values()) > 1e-3:
        sys.exit("the losses differ")
    return found


GPT2 = "model: {family: gpt, layers: 12, hidden: 768, heads: 12, vocab: 50257, "


def things():
    """What a run could leave behind on this machine."""
    folders = ["/dev/shm", "/run/netns", "/run/foretell/labs"]
    return {f"{folder}/{name}" for folder in folders if os.path.isdir(folder) for name in os.listdir(folder)}


def kills(program, folder, arguments):
    drawn = random.Random(arguments.seed)
    plan = lambda topology: ("model: {family: mlp, widths: [64, 256, 128, 10]}\nglobal_batch: 64\nlayout: {data: 2}\noptimizer: adamw\n"
                             f"training: {{learning_rate: 0.0003}}\ntopology: {topology}\n")
    (folder / "here.yaml").write_text(plan("local"))
    (folder / "plan.yaml").write_text(plan("lab-2x1g" if arguments.lab else "local"))
    basic = ["--data", "digits", "--no-evaluation", "--steps", arguments.steps]
    whole = finish(start(program, folder, "--plan", "here.yaml", *basic, "--run", "whole", "--save-every", "never"))
    before, done, runs, restarts, worst = things(), 0, 0, 0, 0.0
    while done < arguments.kills:
        run = folder / f"run{runs}"
        process = start(program, folder, "--plan", "plan.yaml", *basic, "--run", run.name, "--save-every", 50, "--keep", 2, "--elastic", "--max-restarts", 1000)
        wanted = min(arguments.kills - done, drawn.randint(3, 8))
        left, ids = wanted, set()
        while left > 0 and process.poll() is None:
            # Also while ranks start, between two attempts, and while a checkpoint is written.
            time.sleep(drawn.uniform(0.02, 1.5))
            ids.update(ranks_of(process))
            left -= kill_one(process, drawn)
        document = finish(process)
        lines = {line["step"]: line["loss"] for line in map(json.loads, (run / "metrics.jsonl").read_text().splitlines())}
        curve = [lines[step] for step in range(arguments.steps)]
        worst = max(worst, *(abs(one - other) / max(other, 1e-3) for one, other in zip(curve, whole["loss"])))
        partial = [entry.name for entry in (run / "checkpoints").iterdir() if entry.name.startswith(".")]
        alive = [pid for pid in ids if pathlib.Path(f"/proc/{pid}").exists()]
        if partial or alive or worst > 1e-2:
            sys.exit(f"{run}: partial checkpoints {partial}, processes {alive}, losses apart by {worst:.1e}")
        done, runs, restarts = done + wanted - left, runs + 1, restarts + document["restarts"]
    # Other programs make entries, too: only those with our name count.
    left_behind = [name for name in things() - before if "foretell" in name]
    if left_behind:
        sys.exit(f"left behind: {left_behind}")
    table(f"kills {'in a lab' if arguments.lab else 'on this machine'}: runs of {arguments.steps} steps with --elastic",
          [("kills", done), ("runs, all ended", runs), ("restarts", restarts), ("losses apart by at most", f"{worst:.1e}"), ("left behind", "nothing")])
    return {"kills": done, "runs": runs, "restarts": restarts, "largest_loss_difference": worst, "lab": arguments.lab}


def run_and_kill(program, folder, name, arguments, between, drawn):
    """Kills a rank of a run whenever a drawn time has passed. Returns the seconds of the run, and the number of kills."""
    started = time.perf_counter()
    process = start(program, folder, *arguments, "--run", name, "--keep", 2, "--max-restarts", 1000)
    wait_for_steps(process, folder / name, 1)
    next_kill, made = time.perf_counter() + between(drawn), 0
    while process.poll() is None:
        time.sleep(0.002)
        if time.perf_counter() >= next_kill and kill_one(process, drawn):
            made, next_kill = made + 1, time.perf_counter() + between(drawn)
    seconds = time.perf_counter() - started
    finish(process)
    return seconds, made


def goodput(program, folder, arguments):
    mean, between_checkpoints, between_frequent = 4.0, 0.5, 0.03
    topology = lambda restart: (
        "name: host\nnodes:\n- {name: host, count: 1, devices: {kind: cpu-core, count: 2}, link: shared-memory, "
        f"mean_time_between_failures: {mean}s}}\nrestart_time: {restart:.3f}s\n")
    (folder / "host.yaml").write_text(topology(1))
    (folder / "plan.yaml").write_text("model: {family: mlp, widths: [64, 512, 512, 10]}\ntopology: host.yaml\nglobal_batch: 64\n"
                                      "layout: {data: 2, micro_batch: 32}\noptimizer: adamw\n")
    basic = ["--plan", "plan.yaml", "--data", "digits", "--no-evaluation"]
    ask(program, folder, "calibrate", "--topology", "host.yaml", "--plan", "plan.yaml", "--storage", ".", "-o", "profile.yaml")
    simulate = ["simulate", "--plan", "plan.yaml", "--profile", "profile.yaml", "--goodput", "--checkpoint-every"]
    # As many steps as take the wanted seconds.
    trial = finish(start(program, folder, *basic, "--steps", 300, "--run", "trial", "--save-every", 100, "--keep", 2))
    step = statistics.mean(trial["step_seconds"][100:])
    steps = round(arguments.seconds / step)
    every, probe_every = [max(round(seconds / step), 1) for seconds in (between_checkpoints, between_frequent)]
    began = time.perf_counter()
    whole = finish(start(program, folder, *basic, "--steps", steps, "--run", "whole", "--save-every", every, "--keep", 2))
    undisturbed = time.perf_counter() - began
    training = sum(whole["step_seconds"])
    starting = undisturbed - training
    # What a failure costs apart from repeated work, of which frequent checkpoints leave little.
    seconds, made = run_and_kill(program, folder, "probe", [*basic, "--steps", steps, "--save-every", probe_every], lambda _: 1.5, random.Random(1))
    frequent = finish(start(program, folder, *basic, "--steps", steps, "--run", "frequent", "--save-every", probe_every, "--keep", 2))
    repeated = probe_every / 2 * training / steps
    restart = (seconds - starting - sum(frequent["step_seconds"])) / made - repeated
    (folder / "host.yaml").write_text(topology(max(restart, 0.001)))
    # Failures are what is asked about, so the interval has the seconds that it has in the run.
    predicted_step = ask(program, folder, *simulate, every)["step_seconds"]
    answer = ask(program, folder, *simulate, max(round(every * training / steps / predicted_step), 1))["goodput"]
    # In a run of `training` seconds of work, over its failures.
    predicted = mean * (1 - answer["goodput"])
    drawn, runs = random.Random(arguments.seed), []
    for number in range(arguments.runs):
        seconds, made = run_and_kill(program, folder, f"run{number}", [*basic, "--steps", steps, "--save-every", every],
                                     lambda random_: random_.expovariate(1 / mean), drawn)
        runs.append({"seconds": seconds - starting, "kills": made})
    kills_made = sum(run["kills"] for run in runs)
    lost = sum(run["seconds"] for run in runs) - training * len(runs)
    measured = lost / max(kills_made, 1)
    share = training * len(runs) / sum(run["seconds"] for run in runs)
    table(f"goodput: {len(runs)} runs of {steps} steps ({training:.1f} s), a failure each {mean} s, a checkpoint each {every} steps", [
        ("a restart takes", f"{restart:.3f} s"), ("a checkpoint", f"{1e3 * answer['checkpoint_seconds']:.2f} ms, on storage after {1e3 * answer['checkpoint_write_seconds']:.1f} ms"),
        ("kills", kills_made), ("a failure costs, predicted", f"{predicted:.3f} s"), ("a failure costs, measured", f"{measured:.3f} s ({100 * (predicted / measured - 1):+.1f} %)"),
        ("goodput, predicted", f"{100 * answer['goodput']:.1f} %"), ("goodput, measured", f"{100 * share:.1f} % ({100 * (answer['goodput'] / share - 1):+.1f} %)")])
    return {"restart_seconds": restart, "predicted_lost_seconds_per_failure": predicted, "measured_lost_seconds_per_failure": measured,
            "lost_error": predicted / measured - 1, "predicted_goodput": answer["goodput"], "measured_goodput": share, "runs": runs}


def sequential_write(folder, size):
    """Bytes per second of a plain sequential write with one fsync."""
    block = os.urandom(4 << 20)
    started = time.perf_counter()
    with open(folder / "sequential", "wb", buffering=0) as file:
        for _ in range(max(size // len(block), 1)):
            file.write(block)
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    os.remove(folder / "sequential")
    return max(size // len(block), 1) * len(block) / seconds


def checkpoints(program, folder, arguments):
    (folder / "plan.yaml").write_text(f"model: {{family: gpt, layers: 4, hidden: {arguments.hidden}, heads: 8, vocab: 16384, sequence: 64}}\ntopology: local\n"
                                      "global_batch: 16\nlayout: {data: 2, micro_batch: 8}\noptimizer: adamw\n")
    waits, rates, plain, slower = [], [], [], []
    for round_ in range(arguments.rounds):
        more = ["--steps", arguments.steps, "--no-evaluation", "--data", "synthetic", "--save-every", 50, "--keep", 1, "--run", f"run{round_}"]
        document = finish(start(program, folder, "--plan", "plan.yaml", *more))
        (last,) = (folder / f"run{round_}/checkpoints").iterdir()
        size = sum(file.stat().st_size for file in last.iterdir())
        waits.append(document["checkpoint_seconds"])
        rates.append(size / (document["checkpoint_write_seconds"] - document["checkpoint_seconds"]))
        plain.append(sequential_write(folder, size))
        # A checkpoint is copied and written in the first half of each window.
        seconds = document["step_seconds"]
        windows = [seconds[first:first + 50] for first in range(50, len(seconds) - 49, 50)]
        slower += [statistics.mean(window) / statistics.mean(window[25:]) - 1 for window in windows]
    ours, theirs, slow = statistics.median(rates), statistics.median(plain), statistics.median(slower)
    table(f"checkpoints: {size / 1e6:.0f} MB each, {len(slower)} of them", [
        ("a step waits", f"{1e3 * statistics.median(waits):.2f} ms"), ("a step is slower, with one in 50 steps", f"{100 * slow:+.2f} %"),
        ("written, checked and named at", f"{ours / 1e6:.0f} MB/s"), ("a sequential write with fsync", f"{theirs / 1e6:.0f} MB/s"), ("ratio", f"{ours / theirs:.2f}")])
    return {"bytes": size, "wait_seconds": statistics.median(waits), "slowdown": slow, "bytes_per_second": ours, "sequential_bytes_per_second": theirs,
            "ratio": ours / theirs}


def resume(program, folder, arguments):
    model = f"model: {{family: gpt, layers: {arguments.layers}, hidden: {arguments.hidden}, heads: 12, vocab: 50257, sequence: 32}}"
    plan = lambda layout: f"{model}\ntopology: local\nglobal_batch: 2\nlayout: {{{layout}}}\noptimizer: adamw\n"
    (folder / "plan.yaml").write_text(plan("data: 2, micro_batch: 1"))
    finish(start(program, folder, "--plan", "plan.yaml", "--data", "synthetic", "--steps", 1, "--no-evaluation", "--run", "run"))
    found = {}
    for layout in ["data: 2, micro_batch: 1", "pipeline: 2, micro_batch: 1", "tensor: 2, micro_batch: 2", "data: 2, micro_batch: 1, zero: 1"]:
        (folder / "other.yaml").write_text(plan(layout))
        name = f"resumed{len(found)}"
        began = time.perf_counter()
        process = start(program, folder, "--resume", "run", "--run", name, "--plan", "other.yaml", "--steps", 2, "--no-evaluation", "--save-every", "never")
        wait_for_steps(process, folder / name, 1)
        seconds = time.perf_counter() - began
        found[layout] = seconds - finish(process)["step_seconds"][0]
    size = sum(file.stat().st_size for file in (folder / "run/checkpoints/1").iterdir())
    name = "GPT-2 small" if (arguments.layers, arguments.hidden) == (12, 768) else f"GPT-2 with {arguments.layers} layers of {arguments.hidden}"
    table(f"resume: {name}, a checkpoint of {size / 1e6:.0f} MB that `data: 2` wrote; seconds until the first step begins",
          [(layout, f"{seconds:.2f} s") for layout, seconds in found.items()])
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--foretell", type=pathlib.Path, default=ROOT / "target/release/foretell")
    shared.add_argument("--json", type=pathlib.Path, help="file for the figures")
    shared.add_argument("--seed", type=int, default=0)
    environment.add_argument(shared)
    parts = parser.add_subparsers(dest="part", required=True)
    options = {pictures: {"pictures": 2000, "epochs": 3}, gpt2: {}, kills: {"kills": 100, "steps": 3000}, goodput: {"runs": 10, "seconds": 20},
               checkpoints: {"rounds": 3, "steps": 200, "hidden": 512}, resume: {"layers": 12, "hidden": 768}}
    for part, numbers in options.items():
        subparser = parts.add_parser(part.__name__, parents=[shared])
        subparser.set_defaults(run=part)
        for name, default in numbers.items():
            subparser.add_argument(f"--{name}", type=int, default=default)
    parts.choices["kills"].add_argument("--lab", action="store_true", help="in a lab of two hosts")
    arguments = parser.parse_args()
    # Started runs end with this script.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    if arguments.run in (pictures, gpt2):
        environment.enter(arguments.venv)
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as folder:
        figures = arguments.run(arguments.foretell.resolve(), pathlib.Path(folder), arguments)
    if arguments.json:
        arguments.json.write_text(json.dumps({arguments.part: figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
