#!/usr/bin/env python3
"""Attacks real runs of two ranks: kills, stops, full disks, damaged checkpoints. Prints how each ended.

Every run must end in time, name the right cause, leave no process and no temporary file, and go on with `--resume`
where it has a checkpoint. The first run that does not is printed, with the number of its seed, and ends the script.
Usage: cargo build && benches/attacks.py [--foretell PATH] [--count N] [--seed N] [ATTACK...]
Needs only Python 3; full disks need root, for a tmpfs.
"""
import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLAN = "model: {family: mlp, widths: [64, 32, 10]}\ntopology: local\nglobal_batch: 32\nlayout: {data: 2, micro_batch: 16}\n"
PEER_TIMEOUT = 3
# Seconds within which a run must end, beyond its own time-outs: generous, for a busy machine.
SOON = 20


class Wrong(Exception):
    pass


class Run:
    """A run in a folder of its own."""

    def __init__(self, program, folder, arguments):
        self.folder = pathlib.Path(folder)
        (self.folder / "plan.yaml").write_text(PLAN)
        basic = ["execute", "--plan", "plan.yaml", "--oversubscribe", "--no-evaluation", "--run", "run", "--peer-timeout", f"{PEER_TIMEOUT}s"]
        self.child = subprocess.Popen([program, *basic, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.ranks = []

    def wait_for_steps(self, steps):
        metrics, pids = self.folder / "run/metrics.jsonl", self.folder / "run/ranks/pids"
        until = time.monotonic() + 60
        while time.monotonic() < until and self.child.poll() is None:
            if pids.exists() and metrics.exists() and metrics.read_bytes().count(b"\n") >= steps:
                self.ranks = [int(pid) for pid in pids.read_text().split()]
                return
            time.sleep(0.01)
        raise Wrong(f"it does not train: {self.child.communicate()}")

    def end(self, most):
        """The status, standard error, and the seconds until the end."""
        started = time.monotonic()
        try:
            message = self.child.communicate(timeout=most)[1]
        except subprocess.TimeoutExpired:
            raise Wrong(f"it does not end within {most} s") from None
        took = time.monotonic() - started
        until = time.monotonic() + SOON
        while any(alive(pid) for pid in self.ranks):
            if time.monotonic() > until:
                raise Wrong("a rank outlives the run")
            time.sleep(0.02)
        if "panicked" in message:
            raise Wrong(message)
        return self.child.returncode, message, took


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")")[1].split()[0] not in "ZX"
    except (OSError, IndexError):
        return False


def expect(condition, message):
    if not condition:
        raise Wrong(message)


def temporary_files(folder):
    return [str(path) for path in pathlib.Path(folder).rglob(".foretell-*")]


def goes_on(program, folder, steps):
    """Resumes a run, to so many steps. Returns the step that it went on from."""
    arguments = [program, "execute", "--resume", "run", "--steps", str(steps), "--oversubscribe", "--no-evaluation", "--json"]
    done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=120)
    expect(done.returncode == 0, f"it does not go on: {done.stderr}")
    expect(not temporary_files(folder), f"temporary files are left: {temporary_files(folder)}")
    return json.loads(done.stdout)["resumed_from_step"], done.stderr


ENDLESS = ["--steps", "100000000"]


def kill_a_rank(program, folder, choice):
    run = Run(program, folder, ENDLESS + choice.choice([[], ["--tcp"]]))
    run.wait_for_steps(1)
    time.sleep(choice.random() * 0.5)
    rank = choice.randrange(2)
    os.kill(run.ranks[rank], signal.SIGKILL)
    status, message, took = run.end(SOON)
    expect(status == 1 and f"rank {rank} " in message and "SIGKILL" in message, message)
    return took


def kill_the_launcher(program, folder, choice):
    run = Run(program, folder, ["--steps", "100000000", "--save-every", "5", "--keep", "2"] + choice.choice([[], ["--tcp"]]))
    run.wait_for_steps(choice.randrange(1, 60))
    time.sleep(choice.random() * 0.3)
    run.child.kill()
    took = run.end(SOON)[2]
    if any((pathlib.Path(folder) / "run/checkpoints").glob("[0-9]*")):
        made = int(max((pathlib.Path(folder) / "run/checkpoints").glob("[0-9]*"), key=lambda path: int(path.name)).name)
        step, _ = goes_on(program, folder, made + 2)
        expect(step == made, f"it goes on from step {step} of {made}")
    return took


def stop(program, folder, choice, ranks):
    run = Run(program, folder, ENDLESS + choice.choice([[], ["--tcp"]]))
    run.wait_for_steps(1)
    time.sleep(choice.random() * 0.5)
    for rank in ranks:
        os.kill(run.ranks[rank], signal.SIGSTOP)
    status, message, took = run.end(PEER_TIMEOUT + SOON)
    expect(status == 1 and f"rank {ranks[0]} has sent no sign of life" in message, message)
    return took


def full_disk(program, folder, choice):
    disk = pathlib.Path(folder) / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={choice.randrange(48, 400)}k", "none", disk], check=True)
    try:
        run = Run(program, disk, ["--steps", "100000000", "--save-every", str(choice.randrange(1, 8))])
        status, message, took = run.end(SOON + 60)
        full = "No space left" in message or "bytes free" in message or "no storage space" in message
        expect(status in (1, 2) and full, f"{status}: {message}")
        metrics = disk / "run/metrics.jsonl"
        expect(not metrics.exists() or metrics.read_bytes()[-1:] in (b"", b"\n"), "a metric is cut")
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        made = [int(path.name) for path in (disk / "run/checkpoints").glob("[0-9]*")]
        if made:
            step, _ = goes_on(program, disk, max(made) + 2)
            expect(step == max(made), f"it goes on from step {step} of {max(made)}")
        return took
    finally:
        subprocess.run(["umount", disk], check=True)


def damaged_checkpoint(program, folder, choice):
    run = Run(program, folder, ["--steps", "6", "--save-every", "2"])
    status, message, _ = run.end(SOON + 60)
    expect(status == 0, message)
    started = time.monotonic()
    newest = pathlib.Path(folder) / "run/checkpoints/6"
    victim = choice.choice(sorted(newest.iterdir()))
    contents = bytearray(victim.read_bytes())
    match choice.randrange(3):
        case 0:
            contents[choice.randrange(len(contents))] ^= 1 << choice.randrange(8)
        case 1:
            del contents[choice.randrange(len(contents)):]
        case _:
            victim.unlink()
    if victim.exists():
        victim.write_bytes(contents)
    step, message = goes_on(program, folder, 8)
    expect(step == 4 and victim.name in message, f"from step {step}: {message}")
    return time.monotonic() - started


ATTACKS = {
    "a rank is killed": kill_a_rank,
    "the launcher is killed, then resumed": kill_the_launcher,
    "a rank is stopped": lambda program, folder, choice: stop(program, folder, choice, [choice.randrange(2)]),
    "all ranks are stopped": lambda program, folder, choice: stop(program, folder, choice, [0, 1]),
    "the disk is full, then resumed": full_disk,
    "a checkpoint is damaged, then resumed": damaged_checkpoint,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--foretell", default=ROOT / "target/debug/foretell")
    parser.add_argument("--count", type=int, default=20, help="runs of each attack")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("attacks", nargs="*", metavar="ATTACK", help=f"of: {', '.join(ATTACKS)}")
    arguments = parser.parse_args()
    program = str(pathlib.Path(arguments.foretell).resolve())
    print("| attack | runs | ended as promised | median and longest time to the end |\n| --- | --- | --- | --- |", flush=True)
    for name in arguments.attacks or ATTACKS:
        times = []
        for number in range(arguments.seed, arguments.seed + arguments.count):
            folder = tempfile.mkdtemp(prefix="attack-")
            try:
                times.append(ATTACKS[name](program, folder, random.Random(f"{name} {number}")))
            except Wrong as wrong:
                raise SystemExit(f"{name}, seed {number}: {wrong}")
            finally:
                shutil.rmtree(folder, ignore_errors=True)
        times.sort()
        print(f"| {name} | {len(times)} | {len(times)} | {times[len(times) // 2]:.1f} s, {times[-1]:.1f} s |", flush=True)


if __name__ == "__main__":
    main()
