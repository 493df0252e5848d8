"""Writes results.md from the results of tests/gpu.sh. The exit status is 1 if anything failed."""

import json
import pathlib
import re
import statistics
import sys

folder = pathlib.Path(sys.argv[1])
lines, failed = [], []


def runs(kind):
    return sorted((folder / kind).glob("*.json")) if (folder / kind).is_dir() else []


def document(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        failed.append(f"{path.parent.name} {path.stem}")
        return None


for log in sorted(folder.glob("*.status")):
    status = log.read_text().strip()
    lines.append(f"- {log.stem}: {'passed' if status == '0' else 'no time was left' if status == '125' else f'FAILED ({status})'}")
    if status not in ("0", "125"):
        failed.append(log.stem)
        said = log.with_suffix(".log")
        words = said.read_text(errors="replace").splitlines() if said.is_file() else []
        telling = [line for line in words if "panicked at" in line or "FAILED" in line or "ERROR SUMMARY" in line] or words[-3:]
        lines += [f"  - `{line.strip()[:200]}`" for line in telling[:12]]

law = [(path.stem, document(path)) for path in runs("law")]
if law:
    lines += ["", "| layout | loss, first and last | largest difference to one rank |", "| --- | --- | --- |"]
    groups = {}
    for name, run in law:
        if run:
            groups.setdefault(name.split(".")[0], []).append((name, run["loss"]))
    for name, losses in groups.items():
        one = next((loss for layout, loss in losses if layout.endswith(".one")), None)
        for layout, loss in losses:
            apart = max((abs(a - b) / abs(b) for a, b in zip(loss, one)), default=0.0) if one else float("nan")
            lines.append(f"| {layout} | {loss[0]:.4f}, {loss[-1]:.4f} | {apart:.2e} |")
            limit = 2e-2 if any(one in layout for one in ("bf16", "fp8", "resnet")) else 2e-4
            if not apart <= limit:
                failed.append(f"law {layout}: {apart:.2e} beyond {limit:.0e}")

# MFU is relative to an H200's dense bf16 peak (989.4 TFLOP/s, NVIDIA's data sheet). A token takes 6
# FLOPs for each parameter of a product, and 12 for each layer, position and feature of attention,
# half of that if it is causal.
PEAK = 989.4e12
SHAPES = {  # layers, hidden, vocabulary, sequence, batch, causal
    "gpt-1.3b-s1024-b8": (24, 2048, 50257, 1024, 8, True),
    "gpt-1.3b-s2048-b4": (24, 2048, 50257, 2048, 4, True),
    "gpt2-s1024-b16": (12, 768, 50257, 1024, 16, True),
    "bert-base-s512-b32": (12, 768, 30522, 512, 32, False),
}


def utilisation(name, milliseconds):
    # fp8 is compared with the same peak.
    name = name.removesuffix("-fp8")
    if name not in SHAPES:
        return "-"
    layers, hidden, vocabulary, sequence, batch, causal = SHAPES[name]
    a_token = 6 * (12 * layers * hidden**2 + vocabulary * hidden) + 12 * layers * sequence * hidden * (0.5 if causal else 1)
    return f"{a_token * sequence * batch / (milliseconds * 1e-3) / PEAK:.1%}"


peers = {}
for path in folder.glob("pytorch.jsonl"):
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if "milliseconds" in record:
            peers.setdefault(record["case"], {})[record["kind"]] = record["milliseconds"]
speed = [(path.stem, document(path)) for path in runs("speed")]
if speed:
    lines += ["", "| case | foretell ms | PyTorch eager ms | compiled ms | best of PyTorch over ours | our MFU |", "| --- | --- | --- | --- | --- | --- |"]
    for name, run in speed:
        if not run:
            continue
        # The first steps are timed by instruction; the last ones are launched as a graph.
        ours = statistics.median(run["step_seconds"][-20:]) * 1e3
        peer = peers.get(name, {})
        best = min(peer.values(), default=float("nan"))
        lines.append(f"| {name} | {ours:.2f} | {peer.get('eager', float('nan')):.2f} | {peer.get('compiled', float('nan')):.2f} | {best / ours:.2f} | {utilisation(name, ours)} |")

# The time of a step by kind of kernel, from the timed steps.
for name, _ in speed:
    profile = folder / "speed" / f"{name}.check"
    if profile.is_file() and profile.stat().st_size:
        kinds = json.loads(profile.read_text()).get("by_kind", [])
        kinds.sort(key=lambda kind: -kind["measured_seconds"])
        parts = [f"{kind['kind'].removeprefix('compute: ')} {kind['measured_seconds'] * 1e3:.2f}" for kind in kinds[:14]]
        lines += ["", f"{name}, ms a step: " + ", ".join(parts)]

memory = []
for path in folder.rglob("*.log"):
    for arena, used, before in re.findall(r"GPU memory: arena (\d+), in use (\d+), before (\d+)", path.read_text(errors="replace")):
        memory.append((f"{path.parent.name} {path.stem}", int(arena), int(used), int(before)))
# Runs of several ranks are left out: each sees the other ranks' memory too.
memory = [one for one in memory if one[0].startswith(("train ", "speed "))]
if memory:
    lines += ["", "| run | arena (predicted) bytes | in use on the GPU since the start of the driver | arena over in use | held before |", "| --- | --- | --- | --- | --- |"]
    lines += [f"| {name} | {arena} | {used - before} | {arena / (used - before):.3f} | {before} |" for name, arena, used, before in sorted(memory)]

checks = [(path.stem, document(path)) for path in runs("prediction")]
errors = [run["error"] for _, run in checks if run]
# A prediction that failed left only a log.
failed += [f"prediction {log.stem}" for log in sorted((folder / "prediction").glob("*.log"))]
if errors:
    lines += ["", "| layout | predicted s | measured s | error |", "| --- | --- | --- | --- |"]
    lines += [f"| {name} | {r['predicted_step_seconds']:.5f} | {r['measured_step_seconds']:.5f} | {r['error']:+.3f} |" for name, r in checks if r]
    mean = statistics.mean(abs(error) for error in errors)
    lines.append(f"\nPrediction error over {len(errors)} layouts: mean {mean:.3%}, worst {max(map(abs, errors)):.3%}.")

unrun = folder / "unrun.txt"
if unrun.is_file():
    lines += ["", "No time was left for:"] + [f"- `{line.removeprefix('no time was left for: ')[:150]}`" for line in unrun.read_text().splitlines()]
times = folder / "times.txt"
if times.is_file():
    lines += ["", "Took: " + ", ".join(times.read_text().splitlines())]
if failed:
    lines += ["", "Failed:"] + [f"- {name}" for name in failed]
(folder / "results.md").write_text("\n".join(lines) + "\n")
print((folder / "results.md").read_text())
sys.exit(1 if failed else 0)
