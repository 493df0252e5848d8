"""Expands a table at any sizes and number of layers: peak memory and operators of the step.

    python -m foretell.trace.replay TABLE --layers 32 b=1 s=4096 h=4096 n=32 k=8 d=128 f=14336 v=128256
"""

import argparse
import collections
import json
import re
from pathlib import Path

from .dtypes import WIDTHS
from .formula import evaluate


class Table:
    """A table file: `key`, `versions`, `symbols`, `parameters` and `parts` (name -> lines, in the order of execution)."""

    def __init__(self, text):
        self.key, self.versions, self.symbols, self.parameters, self.parts = {}, {}, [], [], {}
        lines = text.splitlines()
        if lines[0] != "foretell-operator-table 1":
            raise ValueError("not an operator table of format 1")
        part = None
        for line in lines[1:]:
            word, _, rest = line.partition(" ")
            if word == "part":
                part = self.parts.setdefault(rest, [])
            elif part is not None:
                part.append(line)
            elif word in ("key", "versions"):
                setattr(self, word, dict(x.split("=", 1) for x in rest.split()))
            elif word == "symbols":
                self.symbols = rest.split()
            elif word == "param":
                self.parameters.append(rest.split())

    @classmethod
    def load(cls, path):
        return cls(Path(path).read_text(encoding="utf-8"))

    def stacks(self):
        """The names of the stacks of layers, in the order of the forward."""
        bases = [re.sub(r"\.(first|last)$", "", p) for p in self.parts]
        return [b for b in dict.fromkeys(bases) if b.startswith("forward.") and b.split(".")[1] not in ("start", "end")
                and not b.endswith(("_start", "_end"))]

    def sequence(self, layers):
        """`(part, lines, layer)` in the order of execution."""
        stacks = {s.split(".")[1] for s in self.stacks()}
        done = set()
        for name in self.parts:
            base = re.sub(r"\.(first|last)$", "", name)
            if base in done:
                continue
            done.add(base)
            if base.split(".")[1] not in stacks:
                yield base, self.parts[base], None
                continue
            order = range(layers) if base.startswith("forward") else reversed(range(layers))
            for i in order:
                variant = base + (".first" if i == 0 else ".last" if i == layers - 1 else "")
                yield base, self.parts.get(variant, self.parts[base]), i


def unrolled(lines, sizes):
    """The lines with their loops written out."""
    out, stack = [], []
    for line in lines:
        if line.startswith("loop "):
            stack.append((evaluate(line[5:], sizes), out))
            out = []
        elif line == "end":
            times, outer = stack.pop()
            out = outer + out * times
        else:
            out.append(line)
    return out


class Result:
    """`peak` and `forward_end` are allocated bytes, parameters left out; `kernels` is {name: [count, bytes]}."""

    def __init__(self):
        self.live = self.peak = self.forward_end = 0
        self.kernels = collections.defaultdict(lambda: [0, 0])
        self.gradients = 0

    def allocate(self, size):
        self.live += size
        self.peak = max(self.peak, self.live)

    def kernel(self, name, size):
        row = self.kernels[name]
        row[0] += 1
        row[1] += size


def round_up(size):
    return -(-size // 512) * 512


def tensor_bytes(text, sizes):
    dtype, _, dims = text.rstrip("]").partition("[")
    size = WIDTHS[dtype]
    for dim in dims.split(",") if dims else ():
        if not dim.startswith("^"):
            size *= evaluate(dim, sizes)
    return size


def replay(table, sizes, layers):
    """Runs the table's allocations and releases."""
    result, live = Result(), collections.defaultdict(list)      # (part, layer, number) -> sizes
    cache = {}
    def size_of(text):
        if text not in cache:
            cache[text] = evaluate(text, sizes)
        return cache[text]
    def kernel_bytes(line):
        if line not in cache:
            body = line.split(" ; ")[0].split(" ")[2:]
            cache[line] = sum(tensor_bytes(x, sizes) for x in body if x != ">")
        return cache[line]
    for part, lines, layer in table.sequence(layers):
        if part == "backward.start":
            result.forward_end = result.live
        for line in unrolled(lines, sizes):
            word, _, rest = line.partition(" ")
            if word == "o":
                result.kernel(rest.split(" ", 1)[0], kernel_bytes(line))
            elif word == "+":
                name, formula = rest.split(" ")
                size = round_up(size_of(formula))
                live[part, layer, name].append(size)
                result.allocate(size)
            elif word == "-":
                place, _, name = rest.rpartition(":")
                home, _, which = place.partition("@")
                if not home:
                    keys = [(part, layer, name)]
                elif which == "all":
                    keys = [(home, i, name) for i in range(layers) if live[home, i, name]]
                elif which == "first":
                    keys = [(home, 0, name)]
                elif which.startswith("last"):
                    keys = [(home, layers - 1 + int(which[4:] or 0), name)]
                elif home.split(".")[1] in ("start", "end") or home.endswith(("_start", "_end")):
                    keys = [(home, None, name)]
                else:
                    keys = [(home, layer + int(which or 0) if layer is not None else int(which), name)]
                for key in keys:
                    if not live[key]:
                        raise ValueError(f"{part} of layer {layer} releases {rest}, which is not allocated")
                    result.live -= live[key].pop()
            elif word == "~":
                result.peak = max(result.peak, result.live + size_of(rest))
            elif word == "g":
                result.gradients += 1
    result.left = {k: v for k, v in live.items() if v}
    return result


def replay_events(events):
    """The same figures from a log of real sizes."""
    from .recorder import Allocation, Boundary, Gradient, Kernel, Release, Workspace
    result, live = Result(), {}
    for event in events:
        if isinstance(event, Kernel):
            result.kernel(event.name, sum(t.bytes for t in (*event.inputs, *event.outputs)))
        elif isinstance(event, Allocation):
            live[event.id] = round_up(event.bytes)
            result.allocate(live[event.id])
        elif isinstance(event, Release):
            result.live -= live.pop(event.id)
        elif isinstance(event, Workspace):
            result.peak = max(result.peak, result.live + event.bytes)
        elif isinstance(event, Gradient):
            result.gradients += 1
        elif isinstance(event, Boundary) and event.part == "backward.start":
            result.forward_end = result.live
    result.left = live
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table")
    parser.add_argument("sizes", nargs="+", help="a size for every symbol of the table: b=1 s=4096 ...")
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--operators", action="store_true", help="print the operators too")
    args = parser.parse_args()
    table = Table.load(args.table)
    sizes = {k: int(v) for k, v in (x.split("=") for x in args.sizes)}
    missing = [s for s in table.symbols if s not in sizes]
    if missing:
        parser.error(f"the table needs {', '.join(missing)} too")
    result = replay(table, sizes, args.layers)
    print(json.dumps({"peak_bytes": result.peak, "forward_end_bytes": result.forward_end, "gradients": result.gradients,
                      "kernels": sum(n for n, _ in result.kernels.values())}))
    if args.operators:
        for name, (count, size) in sorted(result.kernels.items(), key=lambda x: -x[1][1]):
            print(count, size, name)


if __name__ == "__main__":
    main()
