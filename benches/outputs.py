#!/usr/bin/env python3
"""Runs the commands of README and book and compares their outputs with those that are shown.

    cargo build && benches/outputs.py             # what differs; exit 1 if something does (CI)
    cargo build --release && benches/outputs.py --update --program target/release/foretell

A block is a fence that has lines `$ foretell ...`, each followed by its output. A line `...` stands for
any lines, and `...` at the end of a line for the rest of it. The commands of a page run in order, in one
folder that has `examples/` and `docs/`.

YAML blocks are the files that the paragraph before them names, in that order. For what a page does not
show it has comments: `<!-- file: big.yaml of docs/how-to/ask-about-a-step.md -->` is a file of another
page, `<!-- file: r50.yaml -->` the YAML block that follows, and `<!-- run: foretell plan ... -->` a
command that runs first.

Commands whose output differs from machine to machine or from run to run (`execute`, `calibrate`, `local`)
are neither run nor compared, and neither is what needs their files: the summary counts and names them.
"""

import argparse
import difflib
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
VARIES = {"execute", "run", "calibrate", "check", "lab", "doctor", "submit", "status", "generate", "data", "serve"}
FENCE = re.compile(r"^```")
COMMENT = re.compile(r"^<!-- (file|run): (.*?) -->$")
NAMED = re.compile(r"`([\w.-]+\.yaml)`")
# The one part of an output that depends on the machine's speed.
DURATION = re.compile(r"(searched|simulated|took|in) [\d.]+ (ms|s|min)\b")


def commands(lines):
    """The commands of a page: (first line of output, line after it, command)."""
    found, inside, current = [], False, None
    for number, line in enumerate(lines):
        if FENCE.match(line):
            if current:
                found.append((*current, number))
            inside, current = not inside, None
        elif inside and line.startswith("$ "):
            if current:
                found.append((*current, number))
            current = (line[2:], number + 1)
    joined = []
    for command, start, end in found:
        while command.endswith("\\") and start < end:
            command, start = command[:-1] + lines[start].strip(), start + 1
        joined.append((command, start, end))
    return joined


def files(page):
    """The files that a page shows or borrows, by name, and the commands that run first."""
    found, first, names, fence, block, before = {}, [], [], None, [], False
    for line in page.read_text().split("\n"):
        comment = COMMENT.match(line)
        if fence is None and comment and comment[1] == "run":
            first.append(comment[2])
        elif fence is None and comment:
            name, _, of = comment[2].partition(" of ")
            if of:
                found[name] = files(ROOT / of)[0][name]
            else:
                names = [name]
        elif fence is None and FENCE.match(line):
            fence, block = line[3:].strip(), []
        elif fence is None:
            # A paragraph replaces the names of the one before; a blank line keeps them.
            if line.strip():
                names = (names if before else []) + NAMED.findall(line)
        elif FENCE.match(line):
            if fence == "yaml" and names:
                found.setdefault(names.pop(0), "\n".join(block) + "\n")
            elif fence != "yaml":
                names = []
            fence = None
        else:
            block.append(line)
        before = bool(line.strip()) and fence is None and not FENCE.match(line)
    return found, first


def why_not(command):
    """Why a command's output is not compared, if it is not."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError:
        return "not one command"
    if not words or words[0] != "foretell" or any(word in {"|", "&&", ";", ">"} for word in words):
        return "not one command of Foretell"
    if words[1] in VARIES:
        return f"`{words[1]}` depends on the machine"
    if any(word in {"local", "local-gpus"} or word.startswith("profile") for word in words):
        return "depends on the machine"
    return None


def as_pattern(line):
    text = DURATION.sub("\0", line.rstrip())
    if text.strip() == "...":
        return None
    cut = text.endswith("...")
    pattern = re.escape(text[:-3].rstrip() if cut else text).replace("\\\0", DURATION.pattern).replace("\0", DURATION.pattern)
    return re.compile(pattern + (".*" if cut else r"\s*"))


def matches(shown, actual):
    """Whether the lines that a page shows are those of the output, except for what it leaves out."""
    patterns = [as_pattern(line) for line in shown]
    reached = {0}
    for pattern in patterns:
        if pattern is None:
            reached = set(range(min(reached), len(actual) + 1)) if reached else set()
        else:
            reached = {at + 1 for at in reached if at < len(actual) and pattern.fullmatch(actual[at])}
    return len(actual) in reached


def renewed(shown, actual):
    """The shown lines with the numbers of the output. What was left out stays left out, and says so."""
    if not any(line.endswith("...") for line in shown) and len(shown) >= len(actual) - 2:
        return actual
    out, at = [], 0
    for line in shown:
        if line.strip() == "...":
            out.append(line)
            continue
        scores = [(difflib.SequenceMatcher(None, line, other).ratio() - 0.01 * (place - at), place)
                  for place, other in enumerate(actual) if place >= at]
        best = max(scores, default=(0, None))
        if best[0] < 0.3:
            continue
        if best[1] > at and not (out and out[-1].strip() == "..."):
            out.append("...")
        at = best[1] + 1
        kept = actual[best[1]]
        # How long a search took is the machine's; the page's stays.
        if (duration := DURATION.search(line)) and DURATION.search(kept):
            kept = DURATION.sub(lambda _: duration[0], kept, count=1)
        if line.endswith("..."):
            kept = kept[: len(line) - 4].rstrip() + " ..."
        out.append(kept)
    if at < len(actual) and not (out and out[-1].strip() == "..."):
        out.append("...")
    return out


def page(path, program, update):
    text = path.read_text()
    lines = text.split("\n")
    different, unchecked, equal, edits = [], [], 0, []
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for name in ("examples", "docs"):
            (folder / name).symlink_to(ROOT / name)
        shown_files, first = files(path)
        for name, content in shown_files.items():
            (folder / name).write_text(content)
        (folder / "bin").mkdir()
        (folder / "bin" / "foretell").symlink_to(program)
        environment = {**os.environ, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "COLUMNS": "110"}
        for command in first:
            subprocess.run(command, shell=True, cwd=folder, env=environment, check=True, capture_output=True)
        for command, start, end in commands(lines):
            reason = why_not(command)
            if reason is None:
                ran = subprocess.run(command, shell=True, cwd=folder, env=environment, text=True, timeout=900,
                                     stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
                if ran.returncode != 0 and "cannot be read" in ran.stdout:
                    reason = "needs a file that the page does not give"
            if reason is not None:
                unchecked.append((command, reason))
                continue
            actual = ran.stdout.rstrip("\n").split("\n") if ran.stdout.strip() else []
            shown = lines[start:end]
            while shown and not shown[-1].strip():
                shown, end = shown[:-1], end - 1
            if not shown or matches(shown, actual):
                equal += 1
            else:
                new = renewed(shown, actual)
                different.append((command, shown, new))
                edits.append((start, end, new))
    if update:
        for start, end, new in reversed(edits):
            lines[start:end] = new
        path.write_text("\n".join(lines))
    return equal, different, unchecked


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", help="pages [default: README and the book]")
    parser.add_argument("--program", default="target/debug/foretell")
    parser.add_argument("--update", action="store_true", help="write the outputs of today into the pages")
    parser.add_argument("--unchecked", action="store_true", help="name the commands that are not compared")
    options = parser.parse_args()
    program = (pathlib.Path.cwd() / options.program).resolve()
    pages = [pathlib.Path(one).resolve() for one in options.pages] or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    total, differing, left = 0, 0, []
    for path in pages:
        equal, different, unchecked = page(path, program, options.update)
        total += equal
        differing += len(different)
        left += [(path, *one) for one in unchecked]
        for command, shown, new in different:
            print(f"{path.relative_to(ROOT)}: {command}")
            print("\n".join(difflib.unified_diff(shown, new, "shown", "today", lineterm="", n=0)))
    print(f"{total} outputs are as shown, {differing} differ, {len(left)} commands are not compared")
    if options.unchecked:
        for path, command, reason in left:
            print(f"{path.relative_to(ROOT)}: {command}: {reason}")
    sys.exit(1 if differing and not options.update else 0)


if __name__ == "__main__":
    main()
