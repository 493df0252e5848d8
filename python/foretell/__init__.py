"""Foretell from Python: plans, predicts and checks distributed training runs.

>>> import foretell
>>> answer = foretell.plan(model="gpt2", topology="dgx-h100")
>>> answer.predicted.step_seconds, answer.plan["layout"]

Each function runs the `foretell` program of the same name with `--json` and returns its document as
an object: fields are attributes, `.to_dict()` gives the plain document, and a notebook shows a
table. Keyword arguments are the command's options, with underscores for hyphens:
`foretell.plan(model="gpt2", topology="dgx-h100", global_batch=512)`. A failure raises `ForetellError`
with the program's message and hint.
"""

from ._program import ForetellError, command_path, version
from ._results import Breakdown, Check, Plan, Prediction, Record, Search
from ._commands import check, export, models, plan, run_command, simulate, topologies

__all__ = [
    "Breakdown",
    "Check",
    "ForetellError",
    "Plan",
    "Prediction",
    "Record",
    "Search",
    "check",
    "command_path",
    "export",
    "models",
    "plan",
    "run_command",
    "simulate",
    "topologies",
    "version",
]
