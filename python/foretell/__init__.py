"""Foretell from Python: plans, predicts and checks distributed training runs.

>>> import foretell
>>> answer = foretell.plan(model="gpt2", topology="dgx-h100")
>>> answer.predicted.step_seconds, answer.plan["layout"]

Each function runs the `foretell` program of the same name with `--json` and returns its document as
an object: fields are attributes, `.to_dict()` gives the plain document, `.to_frame()` a pandas frame
of layouts, and a notebook shows tables and bars. `draw` makes a timeline. `start_plan` returns a search
that can be followed and cancelled. Keyword arguments are the command's options, with underscores for hyphens:
`foretell.plan(model="gpt2", topology="dgx-h100", global_batch=512)`. A failure raises `ForetellError`
with the program's message and hint.
"""

from ._program import Cancelled, ForetellError, Running, command_path, version
from ._results import Breakdown, Check, Moment, Plan, Prediction, Record, Search, Table
from ._views import Picture
from ._commands import check, draw, export, models, plan, run_command, simulate, start_plan, topologies

__all__ = [
    "Breakdown",
    "Cancelled",
    "Check",
    "ForetellError",
    "Moment",
    "Picture",
    "Plan",
    "Prediction",
    "Record",
    "Running",
    "Search",
    "Table",
    "check",
    "command_path",
    "draw",
    "export",
    "models",
    "plan",
    "run_command",
    "simulate",
    "start_plan",
    "topologies",
    "version",
]
