#!/usr/bin/env python3
"""Attacks real runs of two ranks: kills, stops, floods, mutated bytes, a man in the middle, full disks, damaged files.

Every run must end in time, name the right cause, leave no process and no temporary file, and go on with `--resume`
where it has a checkpoint. The first run that does not is printed, with the number of its seed, and ends the script.
Usage: cargo build && benches/attacks.py [--foretell PATH] [--count N] [--seed N] [ATTACK...]
Needs only Python 3; full disks need root, for a tmpfs. Sends to the loopback interface only.
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

import hostile

ROOT = pathlib.Path(__file__).resolve().parent.parent
PLAN = "model: {family: mlp, widths: [64, 32, 10]}\ntopology: local\nglobal_batch: 32\nlayout: {data: 2, micro_batch: 16}\n"
PEER_TIMEOUT = 3
# Seconds within which a run must end, beyond its own time-outs: generous, for a busy machine.
SOON = 20


class Wrong(Exception):
    pass


class Run:
    """A run in a folder of its own."""

    def __init__(self, program, folder, arguments, variables=None):
        self.folder = pathlib.Path(folder)
        (self.folder / "plan.yaml").write_text(PLAN)
        basic = ["execute", "--plan", "plan.yaml", "--oversubscribe", "--no-evaluation", "--run", "run", "--peer-timeout", f"{PEER_TIMEOUT}s"]
        environment = os.environ | (variables or {})
        self.child = subprocess.Popen([program, *basic, *arguments], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
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

    def steps(self):
        return (self.folder / "run/metrics.jsonl").read_bytes().count(b"\n")

    def require_more_steps(self):
        before = self.steps()
        if not hostile.wait_until(lambda: self.steps() > before, SOON):
            raise Wrong(f"it does not go on after step {before}")

    def losses(self):
        lines = (self.folder / "run/metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]


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
    # Ranks that stop within the same second are named in either order.
    expect(status == 1 and any(f"rank {rank} has sent no sign of life" in message for rank in ranks), message)
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


def stop_and_continue(program, folder, choice):
    """The whole run is stopped for longer than its patience, and goes on."""
    run = Run(program, folder, ENDLESS + choice.choice([[], ["--tcp"]]))
    run.wait_for_steps(1)
    processes = [*run.ranks, run.child.pid]
    choice.shuffle(processes)
    for process in processes:
        os.kill(process, signal.SIGSTOP)
    time.sleep(PEER_TIMEOUT + 1.5)
    choice.shuffle(processes)
    for process in processes:
        os.kill(process, signal.SIGCONT)
    run.require_more_steps()
    time.sleep(1)
    run.require_more_steps()
    return asked_to_stop(program, run)


CALM = []


def require_right_losses(program, losses):
    """Compares the first losses with those of a run without an attack, bit for bit."""
    if not CALM:
        with tempfile.TemporaryDirectory() as folder:
            run = Run(program, folder, ["--steps", "500"])
            status, message, _ = run.end(SOON + 60)
            expect(status == 0, message)
            CALM.extend(run.losses())
    count = min(len(CALM), len(losses))
    expect(count > 0 and losses[:count] == CALM[:count], "other losses than without the attack")


def asked_to_stop(program, run):
    """Ends a run that still trains. Returns the seconds until the end."""
    run.child.send_signal(signal.SIGTERM)
    status, message, took = run.end(SOON)
    expect(status == 128 + signal.SIGTERM, f"{status}: {message}")
    require_right_losses(program, run.losses())
    return took


def flooded(program, folder, choice):
    """Connections to the launcher and the ranks, from the start on."""
    run = Run(program, folder, ENDLESS + ["--tcp"])
    if choice.randrange(2):
        hostile.wait_until(lambda: hostile.listening_ports([run.child.pid]), SOON)
        ports = hostile.listening_ports([run.child.pid])
        expect(ports, "the launcher does not listen")
        hostile.flood(ports, choice, 500)
    run.wait_for_steps(1)
    ports = hostile.listening_ports([run.child.pid, *run.ranks])
    expect(hostile.flood(ports, choice, 1500) > 1000, "the flood did not arrive")
    run.require_more_steps()
    return asked_to_stop(program, run)


JOINING = []


def mutated_bytes(program, folder, choice):
    """Mutations of what a rank sends when it joins, to the launcher and the ranks of a run."""
    if not JOINING:
        with tempfile.TemporaryDirectory() as other:
            _, relay, _ = joined_through(program, other, lambda _is_answer, _start, piece: piece)
            JOINING.append(bytes(relay.recorded))
    run = Run(program, folder, ENDLESS + ["--tcp"])
    run.wait_for_steps(1)
    ports = hostile.listening_ports([run.child.pid, *run.ranks])
    hostile.send_mutated(ports, JOINING[0], choice, 200)
    run.require_more_steps()
    return asked_to_stop(program, run)


def joined_through(program, folder, tamper):
    """A run of six steps whose second rank joins the first as torchrun's would, through a relay. Returns the ends of
    both processes, the relay, and the seconds until the end."""
    ports = [hostile.free_port(), hostile.free_port()]
    relay = hostile.Relay(ports[1], ports[0], tamper)
    started = time.monotonic()
    runs = []
    for rank, port in enumerate(ports):
        (pathlib.Path(folder) / str(rank)).mkdir()
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": hostile.LOOPBACK}
        variables |= {"FORETELL_PORT": str(port), "FORETELL_RUN_KEY": "5a" * 48, "FORETELL_START_SECONDS": "15"}
        runs.append(Run(program, pathlib.Path(folder) / str(rank), ["--steps", "6"], variables))
    # Both may wait for the start, and for a sign of life.
    ends = [run.end(15 + PEER_TIMEOUT + SOON) for run in runs]
    relay.close()
    if ends[0][0] == 0:
        require_right_losses(program, runs[0].losses())
    return ends, relay, time.monotonic() - started


def man_in_the_middle(program, folder, choice):
    """He changes, drops or repeats bytes between a rank and the launcher: the run ends right, or with an error."""
    tampering = hostile.Tampering(choice)
    ends, _, took = joined_through(program, folder, tampering)
    statuses = [status for status, _, _ in ends]
    expect(statuses in ([0, 0], [1, 1]), f"{vars(tampering)}: {ends}")
    # A rank whose own work was done has nothing to say when the launcher ends the run.
    expect(statuses[0] == 0 or "error" in ends[0][1], f"{vars(tampering)}: no reason: {ends}")
    return took


def two_runs_in_one_folder(program, folder, choice):
    """A second process that wants the folder is refused, whatever it asks, and the first one goes on."""
    run = Run(program, folder, ["--steps", "100000000", "--save-every", "20", "--keep", "2"] + choice.choice([[], ["--tcp"]]))
    run.wait_for_steps(choice.randrange(1, 60))
    second = [program, "execute", *choice.choice([["--plan", "plan.yaml", "--run", "run", "--overwrite"], ["--plan", "plan.yaml", "--run", "run"], ["--resume", "run"]])]
    done = subprocess.run([*second, "--steps", "5", "--oversubscribe", "--no-evaluation"], cwd=folder, capture_output=True, text=True, timeout=SOON + 40)
    expect(done.returncode in (1, 2) and "error[" in done.stderr, f"{second}: {done.returncode}: {done.stderr}")
    run.require_more_steps()
    took = asked_to_stop(program, run)
    expect(not temporary_files(folder), f"temporary files are left: {temporary_files(folder)}")
    goes_on(program, folder, run.steps() + 2)
    return took


ATTACKS = {
    "a rank is killed": kill_a_rank,
    "the launcher is killed, then resumed": kill_the_launcher,
    "a rank is stopped": lambda program, folder, choice: stop(program, folder, choice, [choice.randrange(2)]),
    "all ranks are stopped": lambda program, folder, choice: stop(program, folder, choice, [0, 1]),
    "the whole run is stopped and continued": stop_and_continue,
    "2,000 connections by strangers": flooded,
    "200 mutated messages to the ports": mutated_bytes,
    "a man in the middle": man_in_the_middle,
    "two runs in one folder": two_runs_in_one_folder,
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
