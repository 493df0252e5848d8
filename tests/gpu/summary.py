"""Makes a page of the lines that `tests/gpu.sh run` wrote.

    tests/gpu/summary.py OUT..              prints it
    tests/gpu/summary.py --book docs OUT..  writes docs/gpu/results.md and results.jsonl, and lists the page

The exit status is 1 if an item failed. If an item was run more than once, its last line counts.
"""

import json
import pathlib
import sys

# MFU is relative to an H200's or H100's dense bf16 peak (989.4 TFLOP/s, NVIDIA's data sheets). A
# token takes 6 FLOPs for each parameter of a product, and 12 for each layer, position and feature
# of attention, half of that if it is causal.
PEAK = 989.4e12
SHAPES = {  # layers, hidden, vocabulary, sequence, batch, causal
    "gpt-1.3b-s1024-b8": (24, 2048, 50257, 1024, 8, True),
    "gpt-1.3b-s2048-b4": (24, 2048, 50257, 2048, 4, True),
    "gpt2-s1024-b16": (12, 768, 50257, 1024, 16, True),
    "bert-base-s512-b32": (12, 768, 30522, 512, 32, False),
}


def read(folders):
    """Returns the lines of all folders, and the last one of each item."""
    lines = []
    for folder in folders:
        for text in (pathlib.Path(folder) / "results.jsonl").read_text().splitlines():
            try:
                lines.append(json.loads(text))
            except ValueError:
                pass  # the last line of a run that was killed
    return lines, {line["item"]: line for line in lines}


def utilisation(case, milliseconds):
    # fp8 is compared with the same peak.
    shape = SHAPES.get(case[: -len("-fp8")] if case.endswith("-fp8") else case)
    if not shape:
        return ""
    layers, hidden, vocabulary, sequence, batch, causal = shape
    a_token = 6 * (12 * layers * hidden**2 + vocabulary * hidden) + 12 * layers * sequence * hidden * (0.5 if causal else 1)
    return f"{a_token * sequence * batch / (milliseconds * 1e-3) / PEAK:.1%}"


def table(heads, rows):
    if not rows:
        return []
    lines = [heads, ["---"] * len(heads)] + rows
    return [""] + ["| " + " | ".join(str(one).replace("|", "/") for one in line) + " |" for line in lines]


def under(items, part):
    return [(name[len(part) + 1 :], line) for name, line in items.items() if name.startswith(part + "/")]


def machine(items):
    smi = {key: value for key, value in items.get("nvidia-smi", {}).items() if key not in ("item", "status")}
    rows = [[key, value] for key, value in smi.items()]
    rows += [[one["what"], one["detail"]] for one in items.get("doctor", {}).get("findings", [])]
    return table(["machine", ""], rows)


def libraries(items):
    """Whether PyTorch computed with the cuBLASLt that Foretell loaded."""
    ours = [one["detail"] for one in items.get("doctor", {}).get("findings", []) if one["what"] == "cuBLASLt"]
    theirs = sorted({line["cublaslt"] for _, line in under(items, "pytorch") if line.get("cublaslt")})
    if not ours or not theirs:
        return []
    same = all(f" from {path}:" in ours[0] for path in theirs)
    return ["", "Foretell and PyTorch used the same cuBLASLt." if same else f"**PyTorch used another cuBLASLt**: {', '.join(theirs)}."]


def tests(items):
    rows, details = [], []
    for part in ("kernels", "cudnn", "memcheck", "racecheck", "train"):
        found = under(items, part)
        if found:
            count = lambda status: sum(line["status"] == status for _, line in found)
            rows.append([part, count("passed"), count("failed"), count("unrun"), sum(line.get("cases", 0) for _, line in found)])
        for name, line in found:
            if line["status"] == "failed":
                details += ["", f"`{part}/{name}` failed: {line.get('said', '')}"]
                listed = [f"- `{one}`" for one in line.get("failures", []) + line.get("errors", [])]
                details += [""] + listed if listed else []
    return table(["part", "tests passed", "failed", "not run", "kernel cases passed"], rows) + details


def law(items):
    rows = [[name, f"{line['first_loss']:.4f}, {line['last_loss']:.4f}", "" if line["apart"] is None else f"{line['apart']:.2e}", line["status"]]
            for name, line in under(items, "law") if "first_loss" in line]
    return table(["layout", "loss, first and last", "largest difference to one rank", ""], rows)


def speed(items):
    peers = {}
    for name, line in under(items, "pytorch"):
        case, _, kind = name.partition("/")
        if "milliseconds" in line:
            peers.setdefault(case, {})[kind] = line["milliseconds"]
    is_rehearsal, rows = items.get("call", {}).get("rehearsal"), []
    for case, line in under(items, "speed"):
        if "milliseconds" in line:
            ours, theirs = line["milliseconds"], peers.get(case, {})
            best = min(theirs.values(), default=None)
            told = ", ".join(f"{kind} {time:.2f}" for kind, time in theirs.items())
            rows.append([case, f"{ours:.2f}", told, f"{best / ours:.2f}" if best else "", "" if is_rehearsal else utilisation(case, ours)])
    lines = table(["case", "Foretell ms", "PyTorch ms", "best of PyTorch over ours", "our MFU"], rows)
    for case, line in under(items, "kinds"):
        if line["status"] == "measured":
            parts = [f"{kind.replace('compute: ', '')} {measured:.2f}" for kind, (_, measured) in list(line["kinds"].items())[:14]]
            lines += ["", f"{case}, ms of a step by kind of kernel: {', '.join(parts)}."]
    return lines


def memory(items):
    rows = []
    for part in ("train", "speed"):
        for name, line in under(items, part):
            if line.get("memory"):
                arena, used, before = line["memory"]
                rows.append([f"{part}/{name}", arena, used - before, before])
    return table(["run", "arena (predicted) bytes", "in use on the GPU since the start of the driver", "held before"], rows)


def predictions(items):
    found = [(f"{part}/{name}", line) for part in ("calibrated", "prediction") for name, line in under(items, part) if "error" in line]
    rows = [[name, f"{line['predicted_seconds']:.5f}", f"{line['measured_seconds']:.5f}", f"{line['error']:+.3f}", "yes" if line["inside_interval"] else "no"] for name, line in found]
    lines = table(["plan", "predicted s", "measured s", "error", "inside its interval"], rows)
    for name, line in found:
        if name.startswith("calibrated/"):
            lines += table(["kind of kernel", "predicted ms", "measured ms"], [[kind, f"{a:.3f}", f"{b:.3f}"] for kind, (a, b) in line["kinds"].items()])
    errors = [abs(line["error"]) for name, line in found if name.startswith("prediction/")]
    if errors:
        lines += ["", f"Prediction error over {len(errors)} layouts: mean {sum(errors) / len(errors):.2%}, worst {max(errors):.2%}."]
    return lines


def profiles(items):
    times = items.get("profiles/times", {}).get("shares", {})
    lines = table(["kernel", "share of a step's kernels"], [[f"`{name}`", f"{share:.1%}"] for name, share in times.items()])
    for name, line in under(items, "profiles"):
        if line.get("metrics"):
            lines += ["", f"`{name}`: " + ", ".join(f"{key} {value}" for key, value in line["metrics"].items()) + "."]
    return lines


def page(lines, items):
    calls = [line for line in lines if line["item"] == "call"]
    text = ["# Results on a GPU", "", "Made by `tests/gpu/summary.py` from `results.jsonl` beside it; do not edit."]
    text += [""] + [f"- Call of {line['date']}: {', '.join(line['parts'])}." for line in calls]
    if any(line["rehearsal"] for line in calls):
        text += ["", "**A rehearsal on a stand-in: no figure here is of a GPU.**"]
    for section in (machine, libraries, tests, law, speed, memory, predictions, profiles):
        text += section(items)
    for status, title in (("failed", "Failed"), ("missing", "Not there"), ("unrun", "Not run")):
        names = [f"- `{name}`: {line.get('said', '')}" for name, line in items.items() if line["status"] == status]
        text += ["", f"{title}:", ""] + names if names else []
    return "\n".join(text) + "\n"


def main(arguments):
    book = None
    if arguments[:1] == ["--book"]:
        book, arguments = pathlib.Path(arguments[1]), arguments[2:]
    if not arguments:
        sys.exit(__doc__)
    lines, items = read(arguments)
    text = page(lines, items)
    if book:
        if any(line.get("rehearsal") for line in lines):
            sys.exit("these are a rehearsal's results; hint: only results of a GPU belong in the book")
        (book / "gpu").mkdir(exist_ok=True)
        (book / "gpu/results.md").write_text(text)
        (book / "gpu/results.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        contents, entry = (book / "SUMMARY.md").read_text(), "- [Run on GPUs](gpu.md)\n"
        listed = "  - [Results on a GPU](gpu/results.md)\n"
        if listed not in contents:
            (book / "SUMMARY.md").write_text(contents.replace(entry, entry + listed))
    else:
        print(text, end="")
    return 1 if any(line["status"] == "failed" for line in items.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
