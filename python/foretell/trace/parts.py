"""Splits the log of a step into the parts of a table, and numbers the allocations so that layers can be compared.

A part is a list of lines. The layers between the first and the last must give the same lines; `first` and `last` are kept
only where they differ. An allocation has the same number in every layer in which it plays the same role, so that
`- forward.layer@-1:12` is true of every layer. Inside a part a number may be allocated several times (a loop): then it
stands for a pile of equal allocations, and a release takes one from the pile.
"""

import difflib
import re

from . import loops
from .dtypes import WIDTHS
from .formula import product
from .recorder import Allocation, Boundary, Copy, Gradient, Kernel, Release, Workspace


class Part:
    """The events between two boundaries, and the table's name for them."""

    def __init__(self, name, layer):
        self.name, self.layer, self.events, self.numbers = name, layer, [], {}

    def key(self, event, names):
        """What an event is, apart from the numbers of allocations: for matching two layers."""
        if isinstance(event, Release):
            return "-"
        if isinstance(event, Gradient):                         # without the number among the layers of a period
            return ("g", re.sub(r"^\d+\.", "", event.parameter))
        return render(event, names)


def shape(tensor, names):
    dims = ",".join(("^" if once else "") + names(n) for n, once in zip(tensor.shape, tensor.broadcast))
    return f"{tensor.dtype}[{dims}]"


def size(allocation, names):
    if allocation.like is not None:
        return product(WIDTHS[allocation.like.dtype], *(names(n) for n in allocation.like.shape))
    return names(allocation.bytes)


def _workspace(event, names):
    terms = []
    for scale, factors in event.terms:
        rounded = [names(n) if m == 1 else f"{m}*ceil({names(n)}/{m})" for n, m in factors]
        terms.append(product(scale, *rounded))
    return "+".join(terms)


def render(event, names):
    """A line, without the number of the allocation."""
    if isinstance(event, Kernel):
        ins, outs = " ".join(shape(t, names) for t in event.inputs), " ".join(shape(t, names) for t in event.outputs)
        text = " ".join(x for x in ("o", event.name, ins, ">", outs) if x)
        return f"{text} ; {event.extra}" if event.extra else text
    if isinstance(event, Allocation):
        return "+ " + size(event, names)
    if isinstance(event, Workspace):
        return "~ " + _workspace(event, names)
    if isinstance(event, Copy):
        return f"{event.way} " + product(WIDTHS[event.like.dtype], *(names(n) for n in event.like.shape))
    raise TypeError(event)


def cut(events):
    """The log as a list of `Part`s in the order of execution."""
    parts = []
    for event in events:
        if isinstance(event, Boundary):
            parts.append(Part(event.part, event.layer))
        else:
            parts[-1].events.append(event)
    merged = []                                                 # a part that is entered twice in a row is one part
    for part in parts:
        if merged and (merged[-1].name, merged[-1].layer) == (part.name, part.layer):
            merged[-1].events += part.events
        else:
            merged.append(part)
    return merged


def number(parts, layers, names, period=1):
    """Numbers the allocations of every part; layers alike, and like layers of a period."""
    for name in {p.name for p in parts}:
        same = sorted((p for p in parts if p.name == name), key=lambda p: p.layer or 0)
        model = same[min(2, len(same) - 1)] if same[0].layer is not None else same[0]
        roles = [model.key(e, names) for e in model.events]
        for i, event in enumerate(e for e in model.events if isinstance(e, Allocation)):
            model.numbers[event.id] = i + 1
        found = loops.find(roles, names.iterations) if period == 1 else loops.find(roles, range(2, period + 1), 2)
        for loop in found:
            for i, like in loops.neighbours(loop, roles):
                if isinstance(model.events[i], Allocation) and roles[i] == roles[like]:
                    model.numbers[model.events[i].id] = model.numbers[model.events[like].id]
        for part in same:
            if part is model:
                continue
            matches = difflib.SequenceMatcher(None, [part.key(e, names) for e in part.events], roles, autojunk=False)
            for a, b, n in matches.get_matching_blocks():
                for mine, other in zip(part.events[a:a + n], model.events[b:b + n]):
                    if isinstance(mine, Allocation):
                        part.numbers[mine.id] = model.numbers[other.id]
            fresh = max(model.numbers.values(), default=0)
            for event in part.events:
                if isinstance(event, Allocation) and event.id not in part.numbers:
                    fresh += 1
                    part.numbers[event.id] = fresh


def lines(part, owner, layers, names):
    """The lines of a part. `owner` maps an allocation to its part; `layers` is the number of layers of each stack."""
    out, i, events = [], 0, part.events
    while i < len(events):
        event = events[i]
        i += 1
        if isinstance(event, Allocation):
            out.append(f"+ {part.numbers[event.id]} {size(event, names)}")
        elif isinstance(event, (Release, Gradient)):
            home = owner[event.id]
            place, times = "" if home is part else home.name, 1
            if home is not part and home.layer is not None:
                offset = home.layer - part.layer if part.layer is not None and _stack(home) == _stack(part) else None
                if offset is not None and abs(offset) > 1 and home.layer in (0, layers - 1):
                    place += "@first" if home.layer == 0 else "@last"
                elif offset is not None:
                    place += f"@{offset:+d}" if offset else ""
                elif isinstance(event, Release):
                    group, j = {home.layer}, i              # the same allocation of many layers, one after the other
                    while j < len(events) and isinstance(events[j], Release) and _alike(events[j], event, owner):
                        group.add(owner[events[j].id].layer)
                        j += 1
                    if len(group) > 1:
                        times = (j - i + 1) // len(group)   # a loop made several in each layer
                        i, place = j, place + "@all"
                    else:
                        times, i = j - i + 1, j             # a loop made several in one layer
                        back = layers - 1 - home.layer
                        place += "@first" if home.layer == 0 else "@last" + (f"-{back}" if back else "")
            reference = (place + ":" if place else "") + str(home.numbers[event.id])
            line = f"- {reference}" if isinstance(event, Release) else f"g {reference} {event.parameter}"
            looped = max((n for n in names.iterations if n <= times), default=0) if times > 1 else 0
            out += [f"loop {names.iterations[looped]}", line, "end"] if looped else []
            out += [line] * (times - looped)
        else:
            out.append(render(event, names))
    return loops.fold(out, names.iterations) if names.iterations else out


def _stack(part):
    return part.name.partition(".")[2]


def _alike(release, other, owner):
    a, b = owner[release.id], owner[other.id]
    return a.name == b.name and a.layer is not None and a.numbers[release.id] == b.numbers[other.id]


def _sort_releases(part, owner):
    """Releases that follow one another have no order that matters (autocast's cache has none at all): sort them."""
    events, i = part.events, 0
    def place(release):
        home = owner[release.id]
        return (home is not part, home.name, home.numbers[release.id], home.layer or 0)
    while i < len(events):
        j = i
        while j < len(events) and isinstance(events[j], Release):
            j += 1
        events[i:j] = sorted(events[i:j], key=place)
        i = max(j, i + 1)


def _postpone(parts, owner):
    """Where the kinds of layers alternate, or all use what the first one made, the last user of such a tensor releases it
    (rotary tables, position bias): in the backward, let layer 0 begin with the release of all of it."""
    for name in {p.name for p in parts if p.layer is not None and p.name.startswith("backward")}:
        same = {p.layer: p for p in parts if p.name == name}
        home = lambda e: owner[e.id]
        usual = {home(e).numbers[e.id] for e in same[2].events if isinstance(e, Release) and home(e).layer == 1}
        for part in same.values():
            late = [e for e in part.events if isinstance(e, Release) and part.layer and (
                home(e).name == "forward.start" or home(e).layer == 0 and home(e).numbers[e.id] not in usual)]
            if late:
                part.events = [e for e in part.events if e not in late]
                same[0].events = late + same[0].events


def split(events, layers, names, alternating=False, period=1):
    """-> list of (name, variant, lines) in the order of execution; variant is '', 'first' or 'last'."""
    parts = cut(events)
    owner = {e.id: p for p in parts for e in p.events if isinstance(e, Allocation)}
    number(parts, layers, names, period)
    if alternating:
        _postpone(parts, owner)
    for part in parts:
        _sort_releases(part, owner)
    text = {id(p): lines(p, owner, layers, names) for p in parts}
    out, done = [], set()
    for part in parts:
        if part.name in done:
            continue
        done.add(part.name)
        if part.layer is None:
            again = [p for p in parts if p.name == part.name]
            if len(again) > 1:
                raise ValueError(f"{part.name} is entered {len(again)} times")
            out.append((part.name, "", text[id(part)]))
            continue
        same = sorted((p for p in parts if p.name == part.name), key=lambda p: p.layer)
        if [p.layer for p in same] != list(range(layers)):
            raise ValueError(f"{part.name}: layers {[p.layer for p in same]}")
        body = [text[id(p)] for p in same]
        for i in range(2, layers - 1):
            if body[i] != body[1]:
                difference = next(x for x in difflib.unified_diff(body[1], body[i], lineterm="", n=0) if x[0] in "+-" and x[:3] not in ("+++", "---"))
                raise ValueError(f"{part.name}: layers 1 and {i} differ: {difference}")
        variants = [("first", body[0]), ("", body[1]), ("last", body[-1])]
        if part.name.startswith("backward"):
            variants.reverse()
        out += [(part.name, v, b) for v, b in variants if not v or b != body[1]]
    return out
