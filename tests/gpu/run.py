"""Checks and measures the CUDA backend on one GPU: `tests/gpu.sh run OUT 1|2|3|PART..`.

Each item appends a JSON line to OUT/results.jsonl, and prints a line, as soon as it is known, so a run
that is killed still tells. OUT/logs/ has the output of every command. `summary.py` makes a page of the
lines. Needs Python 3.8 and nothing else; `tests/gpu.sh build` makes the two programs that it starts.
"""

import concurrent.futures
import functools
import json
import os
import pathlib
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PROGRAMS = ROOT / "target/gpu"
# The parts of a call, each with the share of the call's time that it may take: a slow part does not
# keep the others from telling anything. A part may use what the parts before it have left.
CALLS = {
    "1": {"machine": 0.1, "kernels": 0.45, "speed:gpt-1.3b-s1024-b8": 0.2, "train": 0.25},
    "2": {"machine": 0.05, "memcheck": 0.25, "racecheck": 0.2, "calibrated": 0.3, "profiles": 0.2},
    "3": {"machine": 0.05, "law": 0.25, "prediction": 0.25, "speed": 0.25, "pytorch": 0.2},
}
# A rehearsal runs small models, because a stand-in for the GPU is slow.
IS_REHEARSAL = os.environ.get("FORETELL_GPU_REHEARSAL") == "1"
# Seconds that the last command may need to stop and to be recorded.
RESERVE = 5


class Results:
    """The folder of results, and the time that is left."""

    def __init__(self, out):
        self.out, self.lock = out, threading.Lock()
        (out / "logs").mkdir(parents=True, exist_ok=True)
        self.lines = open(out / "results.jsonl", "a", buffering=1)
        self.started = time.monotonic()
        self.seconds = float(os.environ.get("FORETELL_GPU_SECONDS", "570"))
        self.deadline = self.started + self.seconds
        # The time by which the current part must end, and the share of the call's time until then.
        self.part_deadline, self.shares = self.deadline, 0.0
        self.has_failed = False

    def begin_part(self, share):
        self.shares += share
        self.part_deadline = self.started + self.shares * self.seconds

    def left(self):
        return min(self.part_deadline, self.deadline - RESERVE) - time.monotonic()

    def record(self, item, status, **more):
        """Writes one result. `status` is passed, failed, measured, missing or unrun."""
        line = {"item": item, "status": status, **more}
        with self.lock:
            self.lines.write(json.dumps(line) + "\n")
            self.has_failed |= status == "failed"
            told = more.get("said") or ", ".join(f"{key} {value}" for key, value in more.items() if not isinstance(value, (list, dict)))
            print(f"{status:8} {item}  {str(told)[:160]}", flush=True)

    def command(self, item, arguments, limit, **environment):
        """Runs a command for at most `limit` seconds and until the deadline. Returns its exit status, its
        standard output and its seconds; `None`, with a result, if there is no time or no such program."""
        seconds = min(limit, self.left())
        if seconds < 2:
            self.record(item, "unrun", said="no time was left for this part")
            return None
        log = self.log(item)
        begun = time.monotonic()
        with open(log, "ab") as errors, tempfile.TemporaryFile() as output:
            try:
                child = subprocess.Popen([str(one) for one in arguments], stdout=output, stderr=errors, cwd=ROOT,
                                         env={**os.environ, **environment}, start_new_session=True)
            except OSError as error:
                self.record(item, "missing", said=f"{arguments[0]} cannot be started: {error.strerror}")
                return None
            try:
                status = child.wait(seconds)
            except subprocess.TimeoutExpired:
                status = 124
                errors.write(f"stopped after {seconds:.0f} s\n".encode())
            try:
                os.killpg(child.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            child.wait()
            output.seek(0)
            text = output.read().decode(errors="replace")
            errors.write(text.encode())
        return status, text, time.monotonic() - begun

    def log(self, item):
        return self.out / "logs" / (re.sub(r"[^\w.-]+", "-", item) + ".log")

    def said(self, item):
        """Returns the end of an item's log, without the folder of this checkout."""
        text = self.log(item).read_text(errors="replace").replace(f"{ROOT}/", "")
        return " | ".join(line.strip() for line in text.splitlines() if line.strip())[-300:]


# ---- machine ----


def machine(results):
    fields = "name,driver_version,memory.total,power.limit,clocks.max.sm,clocks.max.mem,clocks.sm,temperature.gpu,power.draw"
    done = results.command("nvidia-smi", ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"], 30)
    if done:
        values = [value.strip() for value in done[1].strip().split(",")]
        results.record("nvidia-smi", "measured" if done[0] == 0 else "failed", **dict(zip(fields.split(","), values)))
    done = results.command("doctor", [PROGRAMS / "foretell", "doctor", "--json"], 60)
    if done:
        findings = json.loads(done[1]) if done[0] == 0 else []
        status = "passed" if any(one["what"] == "NVIDIA GPUs" and one["found"] for one in findings) else "failed"
        results.record("doctor", status, findings=findings, said="; ".join(f"{one['what']}: {one['detail']}" for one in findings if "GPU" in one["what"]))


# ---- kernels ----

# The tests that use the GPU. Tests of the emulated device are left out: they need the sources at
# the path where they were built.
WANTED = ("cuda", "parts::", "ring::", "tensor_attention", "a_call_that", "a_control")
LEFT_OUT = ("cuda::", "tensor_cores_are_used", "in_parts_match", "speeds::")
if IS_REHEARSAL:
    # CI runs these in the emulator; they take minutes there.
    LEFT_OUT += ("of_model_sizes", "tensor_attention::", "cuda_epilogues")
# These refuse to pass without cuDNN on this GPU.
CUDNN = ("cudnn_has_engines_on", "library::cudnn::tests::library")


def tests(results):
    done = results.command("list of tests", [PROGRAMS / "kernel-tests", "--list"], 60)
    names = [line[: -len(": test")] for line in done[1].splitlines() if line.endswith(": test")] if done else []
    on_gpu = [name for name in names if any(word in name for word in WANTED) and not any(word in name for word in LEFT_OUT)]
    if not on_gpu:
        results.record("list of tests", "failed", said="kernel-tests lists no test")
    return on_gpu, [name for name in names if any(word in name for word in CUDNN)]


def at_once(jobs):
    """Runs jobs, a few at a time: their processes wait for the GPU and for the compiler of kernels."""
    with concurrent.futures.ThreadPoolExecutor(max_workers=2 if IS_REHEARSAL else 4) as pool:
        for job in [pool.submit(job) for job in jobs]:
            job.result()


def check_test(results, part, name, limit, before=(), **environment):
    """Runs one test in a process of its own. A test of many kernels starts child processes, so that one
    illegal address fails one kernel; each kernel that fails is listed."""
    item = f"{part}/{name}"
    arguments = [*before, PROGRAMS / "kernel-tests", name, "--exact", "--nocapture", "--test-threads", "1"]
    done = results.command(item, arguments, limit, FORETELL_TEST_GPU="0", **environment)
    if not done:
        return
    status, text, seconds = done
    # A test of many kernels prints a line for each.
    passed = len(re.findall(r"::\w+ \d+ passed$", text, re.MULTILINE))
    words = results.log(item).read_text(errors="replace").splitlines()
    failures = [line[:300] for line in words if re.match(r"^\d+: ", line)]
    errors = [line.strip()[:300] for line in words if line.startswith("=========") and ("ERROR SUMMARY" in line or "Invalid" in line or "Race" in line)]
    if status == 0 and f"{name} chose no case" in text:
        results.record(item, "unrun", said=f"the test has no case of {environment['FORETELL_TEST_CASES']}")
        return
    if status == 0:
        results.record(item, "passed", seconds=round(seconds, 1), cases=passed)
        return
    if part == "cudnn" and any("cuDNN cannot be loaded" in line for line in words):
        results.record(item, "missing", said="cuDNN cannot be loaded")
        return
    telling = [line for line in words if "panicked at" in line or "stopped after" in line] or [line for line in words if line.strip()][-2:]
    results.record(item, "failed", seconds=round(seconds, 1), cases=passed, failures=failures[:200], errors=errors[:40],
                   said=f"{len(failures)} cases failed" if failures else " | ".join(telling)[:300])


def kernels(results):
    on_gpu, cudnn = tests(results)
    few = {"FORETELL_TEST_CASES": FEW} if IS_REHEARSAL else {}
    # The largest tests come last: a call that is killed has then told most.
    on_gpu.sort(key=lambda name: ("every_" in name, name))
    jobs = [functools.partial(check_test, results, "kernels", name, 90 if IS_REHEARSAL else 200, **few) for name in on_gpu]
    at_once(jobs + [functools.partial(check_test, results, "cudnn", name, 120, FORETELL_REQUIRE_CUDNN="1") for name in cudnn])


# The cases of a rehearsal.
FEW = "Add,Gelu,Softmax"
# Kernels whose blocks share memory in ways that can race. A case's text has its kernel's name.
RACING = "Attention,Sum,Norm,CrossEntropy,Softmax,Sgd,AdamW,Lamb"


def sanitize(results, check):
    """Runs the tests of kernels under a tool of compute-sanitizer, the tests of all kernels first."""
    tool = shutil.which("compute-sanitizer")
    if not tool:
        results.record(check, "missing", said="compute-sanitizer is not on this machine")
        return
    on_gpu, _ = tests(results)
    names = [name for name in on_gpu if "without" not in name and "model_sizes" not in name]
    names.sort(key=lambda name: ("every_" not in name, name))
    more = {}
    if check == "racecheck":
        # Races in shared memory depend on the kernel, not on operands.
        names = [name for name in names if "every_" in name or "tensor_attention" in name]
        more["FORETELL_TEST_CASES"] = RACING
    if IS_REHEARSAL:
        more["FORETELL_TEST_CASES"] = FEW
    before = [tool, "--tool", check, "--target-processes", "all", "--error-exitcode", "9"]
    at_once([functools.partial(check_test, results, check, name, 170, before, **more) for name in names])


# ---- training ----

GPT = "{family: gpt, layers: 4, hidden: 128, heads: 8, vocab: 512, sequence: 64, tied_embeddings: true}"
SMALL_RESNET = "{family: resnet, depth: 18, stem: small, image: 32, channels: 3, classes: 10}"
LARGE = "{family: gpt, layers: 24, hidden: 2048, heads: 16, vocab: 50257, tied_embeddings: true, sequence: %d}"
BERT = "{family: bert, layers: 12, hidden: 768, heads: 12, vocab: 30522, sequence: 512}"
ADAMW = "optimizer: adamw"
# name: model, batch, precision, micro-batch, further lines of the plan
SPEED = {
    "gpt-1.3b-s1024-b8": (LARGE % 1024, 8, "bf16", 8, ADAMW),
    "gpt-1.3b-s1024-b8-fp8": (LARGE % 1024, 8, "fp8", 8, ADAMW),
    "resnet50-b256": ("resnet50", 256, "bf16", 256, ""),
    "gpt2-s1024-b16": ("gpt2", 16, "bf16", 16, ADAMW),
    "bert-base-s512-b32": (BERT, 32, "bf16", 32, ADAMW),
    "gpt-1.3b-s2048-b4": (LARGE % 2048, 4, "bf16", 4, ADAMW),
}
TRAIN = {
    "gpt2": ("gpt2", 8, "bf16", 8, ADAMW),
    "gpt2-fp8": ("gpt2", 8, "fp8", 8, ADAMW),
    "resnet50": ("resnet50", 64, "bf16", 64, "training: {learning_rate: 0.02}"),
}
if IS_REHEARSAL:
    TINY = "{family: gpt, layers: 1, hidden: 32, heads: 2, vocab: 64, sequence: 16, tied_embeddings: true}"
    GPT = "{family: gpt, layers: 2, hidden: 32, heads: 2, vocab: 64, sequence: 16, tied_embeddings: true}"
    tiny = lambda cases: {name: (TINY, 2, precision, 2, ADAMW) for name, (_, _, precision, _, _) in cases.items()}
    SPEED, TRAIN = tiny(SPEED), tiny(TRAIN)


def topology(ranks):
    return f"{{name: one-gpu, devices: {{here: {{base: h200-sxm-141g}}}}, nodes: [{{name: here, devices: {{kind: here, count: {ranks}}}, link: nvswitch-450GB/s}}]}}"


def plan(work, name, model, batch, precision, layout, further="", ranks=1):
    path = work / f"{name}.yaml"
    path.write_text(f"model: {model}\ntopology: {topology(ranks)}\nlayout: {layout}\nglobal_batch: {batch}\nprecision: {precision}\n{further}\n")
    return path


def execute(results, work, item, path, steps, limit, profile=None):
    """Trains a plan. Returns the document of `execute`, or `None` with a result."""
    folder = work / ("run-" + re.sub(r"\W+", "-", item))
    arguments = [PROGRAMS / "foretell", "execute", "--plan", path, "--steps", 8 if IS_REHEARSAL else steps, "--data", "synthetic",
                 "--no-evaluation", "--oversubscribe", "--run", folder, "--json"]
    done = results.command(item, arguments + (["--profile", profile] if profile else []), limit)
    if not done:
        return None
    status, text, seconds = done
    rank_log = folder / "ranks/0.log"
    words = rank_log.read_text(errors="replace") if rank_log.is_file() else ""
    if status != 0:
        results.record(item, "failed", seconds=round(seconds, 1), said=results.said(item) + " " + words[-200:])
        return None
    document = json.loads(text)
    memory = re.search(r"GPU memory: arena (\d+), in use (\d+), before (\d+)", words)
    document["memory"] = [int(one) for one in memory.groups()] if memory else None
    document["seconds"] = round(seconds, 1)
    document["run"] = folder
    return document


def check(results, item, folder):
    """Returns the document of `check`; `None` with a result."""
    done = results.command(item, [PROGRAMS / "foretell", "check", folder, "--json"], 120)
    if done and done[0] == 0:
        return json.loads(done[1])
    if done:
        results.record(item, "failed", said=results.said(item))
    return None


def kinds(document):
    """The time of a step by kind of kernel, from the steps that were timed by instruction."""
    rows = sorted(document["by_kind"], key=lambda row: -row["measured_seconds"])
    return {row["kind"]: [round(row["predicted_seconds"] * 1e3, 4), round(row["measured_seconds"] * 1e3, 4)] for row in rows if row["measured_seconds"] > 0 or row["predicted_seconds"] > 0}


def train(results, work):
    for name, (model, batch, precision, micro_batch, further) in TRAIN.items():
        item = f"train/{name}"
        path = plan(work, f"train-{name}", model, batch, precision, f"{{micro_batch: {micro_batch}}}", further)
        document = execute(results, work, item, path, 60, 150)
        if document:
            loss = document["loss"]
            falls = sum(loss[-5:]) < sum(loss[:5])
            results.record(item, "passed" if falls else "failed", seconds=document["seconds"], memory=document["memory"],
                           first_loss=loss[0], last_loss=loss[-1], said=f"the loss goes from {loss[0]:.4f} to {loss[-1]:.4f}")


def speed(results, work, cases):
    for name in cases:
        model, batch, precision, micro_batch, further = SPEED[name]
        item = f"speed/{name}"
        path = plan(work, f"speed-{name}", model, batch, precision, f"{{micro_batch: {micro_batch}}}", further)
        document = execute(results, work, item, path, 45, 180)
        if not document:
            continue
        # The first steps are timed by instruction; the last ones are launched as a graph.
        milliseconds = statistics.median(document["step_seconds"][-20:]) * 1e3
        results.record(item, "measured", milliseconds=milliseconds, memory=document["memory"], seconds=document["seconds"])
        checked = check(results, f"kinds/{name}", document["run"])
        if checked:
            results.record(f"kinds/{name}", "measured", kinds=kinds(checked))


def pytorch(results):
    """PyTorch's times of the same cases, where the machine has PyTorch. It does not train in fp8 by itself."""
    if results.command("pytorch", [sys.executable, "-c", "import torch; print(torch.__version__)"], 60) is None:
        return
    for name in [name for name in SPEED if not name.endswith("-fp8")]:
        item = f"pytorch/{name}"
        done = results.command(item, [sys.executable, "tests/gpu/pytorch.py", name], 150)
        if done:
            records = [json.loads(line) for line in done[1].splitlines() if line.startswith("{")]
            for record in records:
                results.record(f"{item}/{record['kind']}", "measured" if "milliseconds" in record else "failed", **{key: value for key, value in record.items() if key != "kind"})
            if not records:
                results.record(item, "missing", said=results.said(item))


LAYOUTS = {
    "one": "{micro_batch: 2}",
    "data": "{data: 2, micro_batch: 2}",
    "tensor": "{tensor: 2, sequence_parallel: true, micro_batch: 2}",
    "pipeline": "{pipeline: 2, micro_batch: 2}",
    "zero3": "{data: 2, zero: 3, micro_batch: 2}",
    "context": "{context: 2, micro_batch: 2}",
    "mixed": "{data: 2, tensor: 2, micro_batch: 2}",
}


def law(results, work):
    """Layouts of ranks that share the GPU must train to the losses of one rank."""
    # In bf16, heads of 64 features run on tensor cores.
    groups = [("gpt-fp32", GPT, "fp32", 2e-4), ("gpt-bf16", GPT, "bf16", 2e-2), ("gpt-fp8", GPT, "fp8", 2e-2),
              ("gpt64-bf16", GPT.replace("heads: 8", "heads: 2"), "bf16", 2e-2)]
    for group, model, precision, limit in groups:
        law_group(results, work, group, model, 8, precision, LAYOUTS, "", limit)
    layouts = {"one": "{micro_batch: 8}", "data": "{data: 2, micro_batch: 8}"}
    if not IS_REHEARSAL:
        law_group(results, work, "resnet-fp32", SMALL_RESNET, 32, "fp32", layouts, "batch_norm_group: 8\ntraining: {learning_rate: 0.005}", 2e-2)


def law_group(results, work, group, model, batch, precision, layouts, further, limit):
    one = None
    for layout, text in layouts.items():
        item = f"law/{group}.{layout}"
        document = execute(results, work, item, plan(work, f"{group}.{layout}", model, batch, precision, text, further, ranks=8), 10, 60)
        if not document:
            continue
        loss = document["loss"]
        one = loss if layout == "one" else one
        apart = max(abs(a - b) / abs(b) for a, b in zip(loss, one)) if one else None
        status = "unrun" if apart is None else "passed" if apart <= limit else "failed"
        results.record(item, status, apart=apart, limit=limit, first_loss=loss[0], last_loss=loss[-1], seconds=document["seconds"])


# ---- prediction ----


def calibrated(results, work):
    """Calibration, execution and `check` of the 1.3B plan."""
    model, batch, precision, micro_batch, further = SPEED["gpt-1.3b-s1024-b8"]
    path = plan(work, "calibrated", model, batch, precision, f"{{micro_batch: {micro_batch}}}", further)
    predict(results, work, "calibrated/gpt-1.3b-s1024-b8", path, ["--patience", "50ms", "--calibration-time", "1s" if IS_REHEARSAL else "60s"], 45)


def predict(results, work, item, path, calibration, steps):
    one_gpu, profile = work / "one-gpu.yaml", path.with_suffix(".profile.yaml")
    one_gpu.write_text(topology(1))
    arguments = [PROGRAMS / "foretell", "calibrate", "--topology", one_gpu, "--plan", path, *calibration, "-o", profile]
    done = results.command(f"{item} calibrate", arguments, 200)
    if not done:
        return
    if done[0] != 0:
        results.record(item, "failed", said=results.said(f"{item} calibrate"))
        return
    document = execute(results, work, item, path, steps, 180, profile)
    checked = check(results, item, document["run"]) if document else None
    if checked:
        results.record(item, "measured", predicted_seconds=checked["predicted_step_seconds"], measured_seconds=checked["measured_step_seconds"],
                       error=checked["error"], inside_interval=checked.get("inside_interval"), calibration_seconds=round(done[2], 1), kinds=kinds(checked))


def prediction(results, work):
    model = GPT if IS_REHEARSAL else "{family: gpt, layers: 6, hidden: 512, heads: 8, vocab: 8192, sequence: 256, tied_embeddings: true}"
    layouts = ["{micro_batch: 4}", "{micro_batch: 4, recompute: full}", "{micro_batch: 2}", "{micro_batch: 1}"]
    cases = [(batch, layout) for batch in (4, 8, 16, 32, 64) for layout in layouts]
    for number, (batch, layout) in enumerate(cases[:3] if IS_REHEARSAL else cases, 1):
        path = plan(work, f"prediction-{number}", model, batch, "bf16", layout, ADAMW)
        predict(results, work, f"prediction/gpt-{number}-b{batch}", path, ["--patience", "2ms", "--calibration-time", "1s"], 60)


# ---- profiles ----


def profiles(results, work):
    """Profiles of the five kernels that take most of a step of the 1.3B model, by Nsight Compute."""
    tool = shutil.which("ncu")
    if not tool:
        results.record("profiles", "missing", said="ncu is not on this machine")
        return
    model, batch, precision, micro_batch, further = SPEED["gpt-1.3b-s1024-b8"]
    # Two layers have the kernels of all.
    path = plan(work, "profiles", model.replace("layers: 24", "layers: 2"), batch, precision, f"{{micro_batch: {micro_batch}}}", further)
    run = ["--target-processes", "all", PROGRAMS / "foretell", "execute", "--plan", path, "--steps", 3, "--data", "synthetic", "--no-evaluation"]
    done = results.command("profiles/times", [tool, "--csv", "--metrics", "gpu__time_duration.sum", *run, "--run", work / "profiles-times"], 120)
    if not done:
        return
    times = kernel_times(done[1])
    if not times:
        results.record("profiles/times", "failed", said=results.said("profiles/times"))
        return
    total = sum(times.values())
    largest = sorted(times, key=times.get, reverse=True)[:5]
    results.record("profiles/times", "measured", total_nanoseconds=total, shares={name: round(times[name] / total, 4) for name in largest})
    for name in largest:
        item = f"profiles/{name}"
        chosen = ["--kernel-name", f"regex:^{re.escape(name)}$", "--launch-skip", "2", "--launch-count", "1", "--set", "full"]
        done = results.command(item, [tool, "--csv", "--page", "raw", *chosen, *run, "--run", work / re.sub(r"\W+", "-", item)], 60)
        if done:
            rows = csv_rows(done[1])
            telling = [key for key in (rows[-1] if rows else {}) if re.search(r"gpu__time_duration|throughput.*pct|registers_per_thread|occupancy_limit|warps_active.*pct|dram__bytes", key)]
            results.record(item, "measured" if rows else "failed", metrics={key: rows[-1][key] for key in telling} if rows else {}, said="" if rows else results.said(item))


def csv_rows(text):
    import csv

    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith('"ID"')]
    return list(csv.DictReader(lines[starts[0] :])) if starts else []


def kernel_times(text):
    times = {}
    for row in csv_rows(text):
        if row.get("Metric Name") == "gpu__time_duration.sum":
            times[row["Kernel Name"]] = times.get(row["Kernel Name"], 0) + float(row["Metric Value"].replace(",", ""))
    return times


# ---- the run ----

PARTS = {
    "machine": lambda results, work: machine(results),
    "kernels": lambda results, work: kernels(results),
    "memcheck": lambda results, work: sanitize(results, "memcheck"),
    "racecheck": lambda results, work: sanitize(results, "racecheck"),
    "train": train,
    "law": law,
    "calibrated": calibrated,
    "prediction": prediction,
    "profiles": profiles,
    "speed": lambda results, work: speed(results, work, SPEED),
    "pytorch": lambda results, work: pytorch(results),
}


def main(out, wanted):
    parts = CALLS[wanted[0]] if wanted[0] in CALLS and len(wanted) == 1 else {part: 1 / len(wanted) for part in wanted}
    for part in parts:
        name, _, case = part.partition(":")
        if name not in PARTS or (case and (name != "speed" or case not in SPEED)):
            sys.exit(f"there is no part `{part}`; hint: 1, 2, 3, {', '.join(PARTS)}, speed:CASE with a case of {', '.join(SPEED)}")
    for program in ("foretell", "kernel-tests"):
        if not os.access(PROGRAMS / program, os.X_OK):
            sys.exit(f"`target/gpu/{program}` is missing; hint: run `tests/gpu.sh build`, and carry target/gpu")
    results = Results(pathlib.Path(out).resolve())
    results.record("call", "measured", parts=list(parts), date=time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()), rehearsal=IS_REHEARSAL)
    with tempfile.TemporaryDirectory() as work:
        for part, share in parts.items():
            name, _, case = part.partition(":")
            begun = time.monotonic()
            results.begin_part(share)
            try:
                if case:
                    speed(results, pathlib.Path(work), [case])
                else:
                    PARTS[name](results, pathlib.Path(work))
            except Exception as error:  # the other parts must still run
                results.record(name, "failed", said=f"{type(error).__name__}: {error}")
            results.record(f"part {part}", "measured", seconds=round(time.monotonic() - begun, 1))
    return 1 if results.has_failed else 0


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1], sys.argv[2:]))
