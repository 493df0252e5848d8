"""How far a search is: its last moment, and a line that a notebook or a terminal shows while it goes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Callable

from ._results import Moment


def last_moment(path: Path) -> Moment | None:
    """The last whole line of a search's progress that is a moment."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError:
        return None
    # The text after the last end of a line is empty, or a line that is half written.
    for line in reversed(lines[:-1]):
        document = json.loads(line)
        moment = document.get("progress") or document.get("ended")
        if moment:
            return Moment(moment)
    return None


def show_progress() -> Callable[[Moment], None]:
    """A function that shows a moment in the place of the one before."""
    try:
        from IPython import get_ipython
        from IPython.display import display
    except ImportError:
        get_ipython = None
    if get_ipython is None or get_ipython() is None:
        return lambda moment: print(f"\r{moment}", end="", file=sys.stderr, flush=True)
    handle = display({"text/plain": "searching"}, raw=True, display_id=True)
    return lambda moment: handle.update({"text/plain": str(moment)}, raw=True)
