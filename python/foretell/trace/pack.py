"""Packs a folder of operator tables into the one compressed file that the program has.

    python -m foretell.trace.pack TABLES models/operator-tables.zlib
    python -m foretell.trace.pack --unpack models/operator-tables.zlib TABLES     # back to a folder, to add tables to it

Many tables share parts. So the file has the lines of every part once (`body N`), and tables that name them (`part NAME N`).
Parts that differ share stretches of lines. Each of these stands once too, before the parts (`piece N`), and parts have a
line `= N` in its place. An allocation is packed as its distance from the one before (`relative`): parts that differ by one
allocation share all lines behind it, which makes the file half as large.
`same.txt` in the folder lists sections whose table equals another (`key ... = FILE`): each becomes a table of its own.
"""

import collections
import re
import sys
import zlib
from pathlib import Path

# A piece has at least so many lines, and ends at an operator that one in so many does by its text.
# So two parts are cut at the same places wherever their lines are the same.
SHORTEST, ONE_IN = 8, 4


def relative(body):
    """A part's lines with distances in place of allocations' numbers: `+SIZE` for the number after the last, `-D` and `gD NAME`
    for the one D before the last, `-PLACE:D` for the one D before what that place was last asked for."""
    last, places, lines = 0, {}, []
    for line in body.split("\n"):
        word, _, rest = line.partition(" ")
        if word == "+":
            number, _, size = rest.partition(" ")
            line = f"+{size}" if int(number) == last + 1 else line
            last = int(number)
        elif word in ("-", "g"):
            reference, space, name = rest.partition(" ")
            place, colon, number = reference.rpartition(":")
            before = places.get(place, 0) if colon else last
            line = f"{word}{place}{colon}{before - int(number)}{space}{name}"
            if colon:
                places[place] = int(number)
        lines.append(line)
    return "\n".join(lines)


def absolute(body):
    """A part's lines with allocations' numbers."""
    last, places, lines = 0, {}, []
    for line in body.split("\n"):
        if line.startswith("+ "):
            last = int(line.split(" ")[1])
        elif line.startswith("+"):
            last += 1
            line = f"+ {last} {line[1:]}"
        elif line.startswith(("-", "g")):
            reference, space, name = line[1:].partition(" ")
            place, colon, distance = reference.rpartition(":")
            number = (places.get(place, 0) if colon else last) - int(distance)
            line = f"{line[0]} {place}{colon}{number}{space}{name}"
            if colon:
                places[place] = number
        lines.append(line)
    return "\n".join(lines)


def _cut(body):
    """A part's lines in pieces."""
    pieces, lines = [], []
    for line in body.split("\n"):
        lines.append(line)
        if len(lines) >= SHORTEST and line.startswith("o ") and zlib.crc32(line.encode()) % ONE_IN == 0:
            pieces.append("\n".join(lines))
            lines = []
    return pieces + ["\n".join(lines)] if lines else pieces


def _share(bodies):
    """The pieces that several parts have, with their numbers, and the parts with references to these."""
    cut = [_cut(body) for body in bodies]
    counts = collections.Counter(piece for pieces in cut for piece in pieces)
    numbers = {piece: number for number, piece in enumerate(sorted(p for p, count in counts.items() if count > 1 and p))}
    return numbers, ["\n".join(f"= {numbers[p]}" if p in numbers else p for p in pieces) for pieces in cut]


def pack(folder):
    """The packed text of a folder's tables."""
    bodies, tables = {}, []
    def add(text, key=None):
        head, *parts = text.split("\npart ")
        names = [line.split(" ")[2] for line in head.split("\n") if line.startswith("param ")]
        if len(set(names)) < len(names):
            print(f"left out, since two parameters have one name: {key or head.split(chr(10))[2]}", file=sys.stderr)
            return
        if key:
            head = "\n".join(key if line.startswith("key ") else line for line in head.split("\n"))
        named = [(name, body.strip()) for name, _, body in (part.partition("\n") for part in parts)]
        for name, body in named:
            bodies.setdefault(body, re.sub(r"\.(first|last)$", "", name))
        tables.append((head, named))
    for path in sorted(folder.glob("*.table")):
        add(path.read_text(encoding="utf-8"))
    same = folder / "same.txt"
    for line in same.read_text(encoding="utf-8").splitlines() if same.is_file() else ():
        key, _, name = line.rpartition(" = ")
        add((folder / name).read_text(encoding="utf-8"), key)
    # Bodies that begin alike stand side by side, since zlib looks back 32 KiB.
    known = {body: relative(body) for body in bodies}
    numbers = {body: number for number, body in enumerate(sorted(bodies, key=lambda body: (bodies[body], known[body])))}
    # The newest release first: a reader that asks for no version gets that one where there is one.
    tables.sort(key=lambda table: " version=latest" not in table[0])
    # A part without lines keeps its number.
    pieces, shared = _share([known[body] for body in numbers])
    packed = [f"piece {number}\n{piece}" for piece, number in pieces.items()]
    packed += [f"body {number}\n{body}" if body else f"body {number}" for number, body in enumerate(shared)]
    packed += ["\n".join([head, *(f"part {name} {numbers[body]}" for name, body in named)]) for head, named in tables]
    return "\n".join(packed) + "\n"


def unpack(text, folder):
    """Writes every table of a packed text to a file of its own."""
    from . import matrix
    from .table import file_name
    at = text.index("foretell-operator-table 1\n")
    head, *rest = f"\n{text[:at]}".rstrip("\n").split("\nbody ")
    pieces = dict(piece.partition("\n")[::2] for piece in head.split("\npiece ")[1:])
    whole = lambda body: re.sub(r"^= (\d+)$", lambda reference: pieces[reference[1]], body, flags=re.MULTILINE)
    bodies = {number: whole(body) for number, _, body in (body.partition("\n") for body in rest)}
    for table in text[at:].rstrip("\n").split("\nforetell-operator-table 1\n"):
        lines = []
        for line in table.removeprefix("foretell-operator-table 1\n").split("\n"):
            if line.startswith("key "):
                name = file_name(matrix.complete(dict(word.split("=", 1) for word in line.split(" ")[1:])))
            if line.startswith("part "):
                line, _, number = line.rpartition(" ")
                line += "\n" + absolute(bodies[number]) if bodies[number] else ""
            lines.append(line)
        (folder / name).write_text("\n".join(["foretell-operator-table 1", *lines]) + "\n", encoding="utf-8")


def main():
    if sys.argv[1] == "--unpack":
        packed, folder = map(Path, sys.argv[2:])
        folder.mkdir(parents=True, exist_ok=True)
        return unpack(zlib.decompress(packed.read_bytes()).decode(), folder)
    folder, output = map(Path, sys.argv[1:])
    text = pack(folder)
    output.write_bytes(zlib.compress(text.encode(), 9))
    print(f"{output}: {output.stat().st_size} bytes of {len(text)}")


if __name__ == "__main__":
    main()
