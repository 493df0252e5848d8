"""Finds loops in a part: the same events many times over, once per expert or per chunk of tokens.

The iterations get the same numbers of allocations, so that their lines are equal and can be written once. A number then
stands for a pile of allocations of one size: a release takes one from the pile, whichever.
"""

import difflib

SHORTEST = 3              # iterations


class Loop:
    """`count` iterations of `period` events, from event `start` on."""

    def __init__(self, start, period, count):
        self.start, self.period, self.count = start, period, count

    @property
    def stop(self):
        return self.start + self.period * self.count


def find(roles, counts, shortest=SHORTEST):
    """The loops in a list of roles (see `Part.key`). `counts` are the numbers of iterations to look for."""
    found, place = [], {}
    roles = [place.setdefault(r, len(place)) for r in roles]
    i, n = 0, len(roles)
    while i < n:
        best = None
        later = [j for j in range(i + 1, min(n, i + 1200)) if roles[j] == roles[i]]
        for j in later[:60]:
            period = j - i
            if period < 4:
                continue
            end = i + period
            while end < n and roles[end] == roles[end - period]:
                end += 1
            count = (end - i) // period
            if count >= shortest and count in counts:
                best = Loop(i, period, count)
                break
        if best:
            found.append(best)
            i = best.stop
        else:
            i += 1
    return found


def neighbours(loop, roles):
    """`(event, event of the first iteration)` pairs that play the same role: the other iterations, and incomplete ones
    just before and after the loop."""
    body = roles[loop.start:loop.start + loop.period]
    for i in range(loop.start + loop.period, loop.stop):
        yield i, loop.start + (i - loop.start) % loop.period
    for low, high in ((max(0, loop.start - loop.period), loop.start), (loop.stop, min(len(roles), loop.stop + loop.period))):
        for a, b, n in difflib.SequenceMatcher(None, roles[low:high], body, autojunk=False).get_matching_blocks():
            for k in range(n):
                yield low + a + k, loop.start + b + k


def fold(lines, counts):
    """Writes repeated lines once, between `loop COUNT` and `end`. `counts` maps a number of iterations to its formula."""
    out, i, n = [], 0, len(lines)
    place = {}
    marks = [place.setdefault(x, len(place)) for x in lines]
    while i < n:
        best = None
        for j in [j for j in range(i + 2, min(n, i + 1200)) if marks[j] == marks[i]][:60]:
            period, end = j - i, j
            while end < n and marks[end] == marks[end - period]:
                end += 1
            count = (end - i) // period
            known = next((c for c in (count, count - 1) if c in counts and c >= SHORTEST), None)
            if known:
                best = (period, known)
                break
        if best:
            period, count = best
            out += [f"loop {counts[count]}", *lines[i:i + period], "end"]
            i += period * count
        else:
            out.append(lines[i])
            i += 1
    return out
