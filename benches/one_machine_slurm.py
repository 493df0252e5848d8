#!/usr/bin/env python3
"""Runs Foretell's jobs on a Slurm of this machine: `slurmctld` and two `slurmd`, as one cluster of two nodes.

Checks `sbatch --test-only` on an exported job; submits a job over both nodes and requeues it in the middle; compares its losses with those
of the same plan without Slurm.

With --test-only nothing is submitted (`tests/slurm.rs` runs that).

Needs root and Debian's slurmctld, slurmd, slurm-client and munge. While jobs run, /etc/hosts names the two nodes.
Usage: benches/one_machine_slurm.py --foretell target/debug/foretell [--test-only]
"""
import argparse
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time

CONFIGURATION = """ClusterName=foretell
SlurmctldHost=localhost
SlurmctldPort=17000
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
MpiDefault=none
JobRequeue=1
KillWait=20
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SchedulerParameters=sched_interval=2,sched_min_interval=0
MinJobAge=600
NodeName=n[1-2] NodeHostname=localhost Port=[17001-17002] CPUs=1 RealMemory=2000
PartitionName=main Nodes=n[1-2] Default=YES
"""

PLAN = """model: {family: mlp, widths: [784, 256, 10]}
topology: {name: two, nodes: [{name: n, count: 2, devices: {kind: cpu-core, count: 1}, nics: {count: 1, bandwidth: 10Gbit/s}}],
           network: {kind: switch, latency: 50us}}
layout: {data: 2, micro_batch: 16}
global_batch: 32
precision: fp32
optimizer: sgd
"""
# A step takes a millisecond or so. The job must still run when it is requeued.
STEPS = 2000


def start(folder):
    """Starts the daemons, which write the numbers of their processes into files."""
    for name in ["state", "spool-n1", "spool-n2"]:
        (folder / name).mkdir()
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o600)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    files = [f"--{name}={folder}/munge.{ending}" for name, ending in [("key-file", "key"), ("socket", "socket"), ("pid-file", "pid"),
                                                                   ("log-file", "log"), ("seed-file", "seed")]]
    subprocess.run(["munged", "--force", *files], check=True, stderr=subprocess.DEVNULL)
    subprocess.run(["slurmctld", "-c"], check=True)
    time.sleep(1)
    for node in ["n1", "n2"]:
        subprocess.run(["slurmd", "-N", node], check=True)
    for _ in range(30):
        if subprocess.run(["sinfo", "-h", "-o", "%T"], capture_output=True, text=True).stdout.strip() == "idle":
            break
        time.sleep(1)


HOSTS = pathlib.Path("/etc/hosts")


def wait_for(what, condition, seconds=300):
    end = time.time() + seconds
    while not condition():
        assert time.time() < end, f"no {what} within {seconds} s"
        time.sleep(0.5)


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def check_exported(foretell, folder):
    (folder / "plan.yaml").write_text(PLAN)
    subprocess.run([foretell, "export", "--plan", folder / "plan.yaml", "--to", "slurm", "-o", folder / "exported"], check=True)
    said = subprocess.run(["sbatch", "--test-only", "job.sbatch"], cwd=folder / "exported", capture_output=True, text=True)
    print("sbatch --test-only:", said.stderr.strip())
    assert said.returncode == 0, said.returncode


def check_submitted(foretell, folder):
    steps = ["--steps", str(STEPS), "--save-every", "200", "--keep", "2", "--no-evaluation"]
    job = folder / "job"
    with open(folder / "submit.log", "w") as log:
        submitted = subprocess.Popen([foretell, "submit", "--plan", folder / "plan.yaml", "-o", job, "--", *steps], stdout=log, stderr=log)
    wait_for("checkpoint", lambda: list(job.glob("run-*/checkpoints/*/state.json")), 100)
    print(subprocess.run([foretell, "status"], check=True, capture_output=True, text=True).stdout)
    [run] = job.glob("run-*")
    number = run.name.removeprefix("run-")
    subprocess.run(["scontrol", "requeue", number], check=True)
    before = len(losses(run))
    status = submitted.wait(timeout=600)
    print((folder / "submit.log").read_text())
    assert status == 0, status
    log = (job / f"job-{number}.log").read_text()
    assert "resum" in log.lower() or before < STEPS, log

    # The same layout on this machine's own cores.
    before_topology, after_topology = PLAN[:PLAN.index("topology:")], PLAN[PLAN.index("layout:"):]
    (folder / "alone.yaml").write_text(f"{before_topology}topology: local\n{after_topology}")
    alone = [foretell, "execute", "--plan", folder / "alone.yaml", *steps, "--run", folder / "alone", "--oversubscribe", "--tcp"]
    subprocess.run(alone, check=True, stdout=subprocess.DEVNULL)
    own, alone = losses(run), losses(folder / "alone")
    assert before < STEPS and len(own) == len(alone) == STEPS, (before, len(own), len(alone))
    assert own == alone, "the losses differ"
    print(f"requeued after {before} of {STEPS} steps; the losses are those of a run without Slurm, to the last bit")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--foretell", required=True)
    parser.add_argument("--test-only", action="store_true")
    arguments = parser.parse_args()
    foretell = str(pathlib.Path(arguments.foretell).resolve())
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        names = HOSTS.read_text()
        try:
            start(folder)
            check_exported(foretell, folder)
            if not arguments.test_only:
                # Ranks connect to the nodes by their names.
                HOSTS.write_text(names + "127.0.0.1 n1 n2\n")
                check_submitted(foretell, folder)
        finally:
            if not arguments.test_only:
                HOSTS.write_text(names)
            for daemon in folder.glob("*.pid"):
                os.kill(int(daemon.read_text()), signal.SIGTERM)
            time.sleep(2)


if __name__ == "__main__":
    main()
