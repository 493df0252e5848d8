"""Writes operator tables: `python -m foretell.trace.table OUT_DIR --key architecture=llama attention=flash ...` or `--all`.

Every table is traced in a process of its own, forked from one that has loaded the framework, and then checked against a
fresh trace at other sizes and another number of layers.
"""

import argparse
import importlib.metadata
import json
import os
import pickle
import re
import sys
import time
import traceback
from pathlib import Path

from . import matrix, older, sizes
from .formula import Names

PROBE_LAYERS, CHECK_LAYERS = 4, 6
# Above 65,536 words foak's cross entropy has four small kernels more.
WIDE_VOCABULARY = 70016
SAME = "same.txt"       # lines `key ... = FILE`: sections that are another table, word for word


def forked(function, *args):
    """The result of `function(*args)` in a child process: a trace changes the framework for good."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            answer = (True, function(*args))
        except BaseException as error:
            answer = (False, f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}\n" + traceback.format_exc())
        with os.fdopen(write, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    os.waitpid(child, 0)
    if not data:
        raise RuntimeError("the trace ended without an answer")
    fine, answer = pickle.loads(data)
    if not fine:
        raise RuntimeError(answer)
    return answer


def names_of(key):
    from . import losses
    from .models import find
    architecture = find(key)
    here, there = (architecture.sizes(s, key) for s in sizes.of(key)[:2])
    names = Names(here, there, ("s-1", "s+1", "n/k", "32*ceil(s/32)", "16*ceil(s/16)", "u-1", "u+1", "32*ceil(u/32)", "16*ceil(u/16)", "b*(s-1)-(c-1)*q", "b*s-(c-1)*q", *(("b/2",) if key["loss"].startswith("dpo") else ()), *(("s/16", "s/32", "s/64", "s+16") if key["compiled"] != "none" else ()), *architecture.atoms), architecture.constants,
                       ("c",) + (("E",) if key["experts"] == "eager" else ()))
    if key["compiled"] != "none":                               # parts of a reduction
        names.constants |= set(range(3, 64)) - {x for n in here.values() for x in (n, 2 * n)} - {here.get("n", 1) // here.get("k", 1)}
    if key["loss"] in losses.FUSED:
        names.constants.add(losses.TRACED_TILE)
    if key["adapter"].startswith("int8lora"):
        from . import int8
        names.constants.add(int8.OUTLIERS)
    if key["adapter"].startswith("qlora"):
        from . import qlora
        names.constants.add(256)                                # the scales' code book
        names.known |= {value: (text, None) for value, text in qlora.formulas(here).items()}
    return here, names


def make(key, versions, device="cuda"):
    """The text of a table, and a list of remarks. `device` is the one whose operators the step has: `cuda` or `cpu`."""
    from . import losses, parts, step
    from .models import find
    from .recorder import DTYPES
    here, names = names_of(key)
    events, parameters, stacks = step.trace(key["architecture"], here, PROBE_LAYERS, key, device)
    body = parts.split(events, PROBE_LAYERS, names, find(key).alternating, find(key).period)
    lines = ["foretell-operator-table 1", "versions " + " ".join(f"{k}={v}" for k, v in versions.items()),
             key_line(key)]
    listed = []
    for p in parameters:
        if p.layer not in (None, 1) or p.like:
            continue
        flags = [f for f in ("adapter", "frozen", "buffer") if getattr(p, f)] + ([f"tied={p.tied}"] if p.tied else [])
        listed.append(" ".join(["param", p.stack or "once", p.name, DTYPES[p.dtype], *map(names, p.shape), *flags]))
    text = "\n".join(line for _, _, part in body for line in part)
    used = [s for s in here if any(s in tokens(x) for x in (text, *listed))]
    lines += ["symbols " + " ".join(used), *listed]
    for name, variant, part in body:
        lines += [f"part {name}" + (f".{variant}" if variant else ""), *part]
    if key["loss"] in losses.FUSED:
        lines = [losses.tile(line) for line in lines]
    remarks = []
    if names.unknown:
        remarks.append(f"sizes without a formula: {sorted(names.unknown)}")
    return "\n".join(lines) + "\n", remarks


def tokens(text):
    """The symbols in a text."""
    return set(re.findall(r"(?<![A-Za-z_.])[A-Za-z](?![A-Za-z_0-9.])", text))


def check(key, text, layers=CHECK_LAYERS, base=None):
    """Compares a table with a fresh trace at other sizes -> dictionary of figures."""
    from . import losses, models, replay, step
    base = base or sizes.of(key)[2]
    if key["kernels"].startswith("foak"):
        base = {**base, "v": WIDE_VOCABULARY}
    here = models.find(key).sizes(base, key)
    events, _, _ = step.trace(key["architecture"], here, layers, key)
    if key["loss"] in losses.FUSED:                             # compare with what was traced
        text = losses.tile(text, losses.FUSED_TILE, losses.TRACED_TILE)
    true, told = replay.replay_events(events), replay.replay(replay.Table(text), here, layers)
    wrong = [k for k in {*true.kernels, *told.kernels} if list(true.kernels.get(k, ())) != list(told.kernels.get(k, ()))]
    return {"peak": true.peak, "peak_error": told.peak / true.peak - 1, "forward_error": told.forward_end / max(1, true.forward_end) - 1,
            "kernels": sum(n for n, _ in true.kernels.values()), "kernels_told": sum(n for n, _ in told.kernels.values()),
            "bytes_error": sum(b for _, b in told.kernels.values()) / sum(b for _, b in true.kernels.values()) - 1,
            "wrong_kernels": wrong[:8], "gradients": [true.gradients, told.gradients],
            "left": len(true.left) - true.gradients, "left_told": sum(map(len, told.left.values())) - told.gradients}


def versions_of(key):
    names = ["torch", *matrix.packages(key)]
    return {n: importlib.metadata.version(n) for n in names}


def can_trace(key):
    """Whether the packages of a key are installed, and its release of transformers."""
    from . import scans
    if not scans.has(key["architecture"]):
        return False
    if key["framework"] == "hf" and (key["version"] != older.release() or not older.has(key["architecture"])):
        return False
    try:
        return bool(versions_of(key))
    except importlib.metadata.PackageNotFoundError:
        return False


def key_line(key):
    """A key as tables state it. Eager steps say nothing of a compiler."""
    return "key " + " ".join(f"{k}={v}" for k, v in key.items() if (k, v) != ("compiled", "none"))


def file_name(key):
    """The key's values, the usual ones left out."""
    words = [v if k in ("architecture", "attention", "precision") else f"{k}-{v}" for k, v in key.items()
             if k in ("architecture", "attention", "precision") or v != matrix.USUAL[k]]
    return "_".join(words) + ".table"


def twin(text, path):
    """The name of another table in the folder with the same body."""
    body = lambda t: t.split("\n", 3)[3]
    mine = body(text)
    for other in sorted(path.parent.glob("*.table")):
        if other.name != path.name and body(other.read_text(encoding="utf-8")) == mine:
            return other.name
    return None


def write(key, folder, checked=True):
    began = time.time()
    report = {"key": key}
    try:
        text, remarks = forked(make, key, versions_of(key))
        path = Path(folder) / file_name(key)
        same = twin(text, path)
        if same:
            path.unlink(missing_ok=True)
            with open(Path(folder) / SAME, "a", encoding="utf-8") as file:
                file.write(f"{text.splitlines()[2]} = {same}\n")
            return report | {"file": path.name, "same": same, "seconds": round(time.time() - began, 1)}
        path.write_text(text, encoding="utf-8")
        report |= {"file": path.name, "lines": text.count("\n"), "bytes": len(text), "remarks": remarks}
        if checked:
            report |= forked(check, key, text)
    except RuntimeError as error:
        # A table that does not expand is none.
        (Path(folder) / file_name(key)).unlink(missing_ok=True)
        report["failed"] = str(error)
    report["seconds"] = round(time.time() - began, 1)
    return report


def preload():
    from . import scans
    scans.install()
    import torch, transformers, peft, accelerate.utils          # noqa: F401, E401
    import torch.utils.checkpoint, torch._subclasses             # noqa: F401, E401
    from transformers import AutoModelForCausalLM                # noqa: F401
    from . import cuda, models, parts, replay, step              # noqa: F401


def main():
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", metavar="OUT_DIR")
    parser.add_argument("--key", nargs="+", default=[], metavar="NAME=VALUE", help="one table; what is left out has its usual value")
    parser.add_argument("--all", action="store_true", help="every table of the matrix that is not in the folder yet")
    parser.add_argument("--only", default=[], nargs="*", metavar="NAME=VALUE", help="with --all: the keys that have these words")
    parser.add_argument("--again", action="store_true", help="with --all: also tables that exist")
    parser.add_argument("--report", help="append a JSON line for every table to this file")
    args = parser.parse_args()
    Path(args.folder).mkdir(parents=True, exist_ok=True)
    keys = list(matrix.keys()) if args.all else [matrix.complete(dict(x.split("=", 1) for x in args.key))]
    keys = [k for k in keys if all(w in key_line(k).split() for w in args.only)]
    if args.all:
        possible = [k for k in keys if can_trace(k)]
        if len(possible) < len(keys):
            print(f"{len(keys) - len(possible)} tables need packages that are not installed", flush=True)
        keys = possible
    twins = Path(args.folder) / SAME
    lines = twins.read_text(encoding="utf-8").splitlines(True) if twins.exists() else []
    known = {line.split(" = ")[0] for line in lines}
    if args.all and not args.again:
        keys = [k for k in keys if not (Path(args.folder) / file_name(k)).exists() and key_line(k) not in known]
    elif lines:                                                 # what is made again is no longer known to be the same
        again = {key_line(k) for k in keys}
        twins.write_text("".join(line for line in lines if line.split(" = ")[0] not in again), encoding="utf-8")
    preload()
    for key in keys:
        report = write(key, args.folder)
        if args.report:
            with open(args.report, "a", encoding="utf-8") as file:
                file.write(json.dumps(report) + "\n")
        if "same" in report:
            print(f"{report['file']}: as {report['same']}", flush=True)
        elif "failed" in report:
            print("FAILED", file_name(key), report["failed"].splitlines()[0], flush=True)
            if not args.all:
                print(report["failed"], file=sys.stderr)
        else:
            print(f"{report['file']}: {report['lines']} lines, peak {report['peak_error']:+.3%}, forward {report['forward_error']:+.3%}, "
                  f"operators {report['kernels_told']}/{report['kernels']}, bytes {report['bytes_error']:+.3%}, {report['seconds']} s",
                  *report["remarks"], report["wrong_kernels"] or "",
                  f"left {report['left']}, told {report['left_told']}" if report["left"] or report["left_told"] else "", flush=True)


if __name__ == "__main__":
    main()
