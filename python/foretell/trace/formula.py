"""Sizes as formulas: `4*b*(s-1)*v`. Products of symbols and integers, sums, exact division, `ceil(a/b)`."""

import functools
import itertools
import math
import re
from fractions import Fraction


@functools.lru_cache(None)
def _compiled(text):
    return compile(text, text, "eval")


def evaluate(text, sizes):
    """The integer that a formula gives at these sizes."""
    scope = {name: Fraction(value) for name, value in sizes.items()}
    value = Fraction(eval(_compiled(text), {"__builtins__": {}, "ceil": lambda x: Fraction(math.ceil(x))}, scope))
    if value.denominator != 1:
        raise ValueError(f"{text} is {value} at {sizes}: not a whole number")
    return int(value)


def product(*factors):
    """One formula for a product of formulas; numbers are multiplied out and put first."""
    number, rest = Fraction(1), []
    for factor in factors:
        for piece in _split(str(factor)):
            head, _, below = piece.partition("/") if "(" not in piece else (piece, "", "")
            if piece.isdigit():
                number *= int(piece)
            elif below.isdigit() and head.isalpha():
                number /= int(below)
                rest.append(head)
            else:
                rest.append(piece)
    if number.denominator != 1 and rest:                        # put the division back behind a symbol
        rest.append(f"{rest.pop()}/{number.denominator}")
    if number.numerator != 1 or not rest:
        rest.insert(0, str(number.numerator))
    return "*".join(rest)


def _split(text):
    """The factors of a formula, cut at the stars that are outside of parentheses; sums become one factor."""
    depth, start, factors = 0, 0, []
    for i, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0 and letter in "+-":
            return [f"({text})"]
        if depth == 0 and letter == "*":
            factors.append(text[start:i])
            start = i + 1
    return factors + [text[start:]]


class Names:
    """Recognises the dimensions of a model whose sizes are `sizes` (symbol -> number).

    `check` are other sizes of the same model: two formulas that agree there too are the same formula written twice.
    `atoms` are formulas that may occur as a factor, beside the symbols (`s-1`, `n+2*k`).
    """

    def __init__(self, sizes, check, atoms=(), constants=(), loops=()):
        self.sizes, self.unknown, self.constants = sizes, set(), set(constants)
        self.known, self.clashes = {}, {}
        factors = [*sizes, *(f"({a})" if any(c in a for c in "+-") else a for a in atoms)]
        factors = [f for f in factors if set(re.findall(r"[A-Za-z]+", f)) <= {*sizes, "ceil"}]
        values = {f: (Fraction(evaluate(f, sizes)), Fraction(evaluate(f, check))) for f in factors}
        scales = [Fraction(n) for n in (1, 2, 3, 4, 8)] + [Fraction(1, n) for n in (2, 4)]
        for count in range(1, 5):
            for scale in scales[:1] if count == 4 else scales:
                for combo in itertools.combinations_with_replacement(factors, count):
                    here = math.prod((values[f][0] for f in combo), start=scale)
                    there = math.prod((values[f][1] for f in combo), start=scale)
                    self._add(combo, scale, here, there)
        self.iterations = {}                                    # number of iterations -> formula, for `loops`
        for symbol in loops:
            if symbol in sizes:
                self.iterations |= {sizes[symbol] - n: f"{symbol}-{n}" if n else symbol for n in (3, 2, 1, 0)}

    def _add(self, combo, scale, here, there):
        if here.denominator != 1:
            return
        old = self.known.get(int(here))
        if old is None:
            text = "*".join(combo)
            if scale > 1:
                text = f"{scale.numerator}*{text}"
            elif scale < 1:
                text = f"{text}/{scale.denominator}"
            self.known[int(here)] = (text, there)
        elif old[1] != there:
            self.clashes.setdefault(int(here), []).append("*".join(combo) + f" x {scale}")

    def __call__(self, number):
        """The formula of a size; a number that is no size of the model stays a number, and is remembered."""
        if number in self.constants or number <= 2:
            return str(number)
        if number in self.known:
            return self.known[number][0]
        for constant in self.constants:                         # a multiple of a fixed size
            if constant > 2 and number % constant == 0 and number // constant in self.known:
                return f"{constant}*{self.known[number // constant][0]}"
        self.unknown.add(number)
        return str(number)
