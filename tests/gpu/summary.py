"""Puts what tests/gpu.sh left in its folder into one table, results.md, and says by its status whether anything failed."""

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
        failed.append(path.stem)
        return None


for log in sorted(folder.glob("*.status")):
    status = log.read_text().strip()
    lines.append(f"- {log.stem}: {'passed' if status == '0' else f'FAILED ({status})'}")
    if status != "0":
        failed.append(log.stem)

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
            limit = 2e-2 if "bf16" in layout or "resnet" in layout else 2e-4
            if not apart <= limit:
                failed.append(f"law {layout}: {apart:.2e} beyond {limit:.0e}")

peers = {}
for path in folder.glob("pytorch.jsonl"):
    for line in path.read_text().splitlines():
        record = json.loads(line)
        if "milliseconds" in record:
            peers.setdefault(record["case"], {})[record["kind"]] = record["milliseconds"]
speed = [(path.stem, document(path)) for path in runs("speed")]
if speed:
    lines += ["", "| case | foretell ms | PyTorch eager ms | compiled ms | best of PyTorch over ours |", "| --- | --- | --- | --- | --- |"]
    for name, run in speed:
        if not run:
            continue
        # The first steps are timed instruction by instruction; the last are launched at once.
        ours = statistics.median(run["step_seconds"][-20:]) * 1e3
        peer = peers.get(name, {})
        best = min(peer.values(), default=float("nan"))
        lines.append(f"| {name} | {ours:.2f} | {peer.get('eager', float('nan')):.2f} | {peer.get('compiled', float('nan')):.2f} | {best / ours:.2f} |")

memory = []
for path in folder.rglob("0.log"):
    for arena, used in re.findall(r"GPU memory: arena (\d+), in use (\d+)", path.read_text(errors="replace")):
        memory.append((path.parent.parent.name, int(arena), int(used)))
if memory:
    lines += ["", "| run | arena (foretold) bytes | in use on the GPU | arena over in use |", "| --- | --- | --- | --- |"]
    lines += [f"| {name} | {arena} | {used} | {arena / used:.3f} |" for name, arena, used in sorted(memory)]

checks = [(path.stem, document(path)) for path in runs("prediction")]
errors = [run["error"] for _, run in checks if run]
if errors:
    lines += ["", "| layout | predicted s | measured s | error |", "| --- | --- | --- | --- |"]
    lines += [f"| {name} | {r['predicted_step_seconds']:.5f} | {r['measured_step_seconds']:.5f} | {r['error']:+.3f} |" for name, r in checks if r]
    mean = statistics.mean(abs(error) for error in errors)
    lines.append(f"\nPrediction error over {len(errors)} layouts: mean {mean:.3%}, worst {max(map(abs, errors)):.3%}.")

if failed:
    lines += ["", "Failed:"] + [f"- {name}" for name in failed]
(folder / "results.md").write_text("\n".join(lines) + "\n")
print((folder / "results.md").read_text())
sys.exit(1 if failed else 0)
