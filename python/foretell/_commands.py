"""One function a command. Options are those of the command line, which alone knows them."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any, Mapping, Sequence, Union

from ._program import document
from ._results import Check, Plan, Prediction, Record

PathLike = Union[str, os.PathLike]
# A name or a file, or the mapping that a file would hold.
Source = Union[PathLike, Mapping[str, Any], Record]


def _options(options: Mapping[str, Any]) -> list[str]:
    """`global_batch=512` becomes `--global-batch=512`, `explain=True` `--explain`; lists repeat an option."""
    arguments: list[str] = []
    for name, value in options.items():
        option = "--" + name.rstrip("_").replace("_", "-")
        if value is None or value is False:
            continue
        if value is True:
            arguments.append(option)
        elif isinstance(value, Mapping):
            # As `--fix tensor=8,pipeline=4` has it.
            arguments.append(f"{option}=" + ",".join(f"{key}={one}" for key, one in value.items()))
        elif isinstance(value, (list, tuple)):
            arguments.extend(f"{option}={one}" for one in value)
        else:
            arguments.append(f"{option}={os.fspath(value) if isinstance(value, os.PathLike) else value}")
    return arguments


class _Files:
    """Files of mappings, for as long as a command runs. JSON is YAML too, which all readers take."""

    def __enter__(self) -> _Files:
        self._folder = tempfile.TemporaryDirectory(prefix="foretell-")
        return self

    def __exit__(self, *_: object) -> None:
        self._folder.cleanup()

    def of(self, name: str, source: Source) -> str:
        if isinstance(source, Record):
            source = source.to_dict()
        if isinstance(source, Mapping):
            path = Path(self._folder.name) / f"{name}.yaml"
            path.write_text(json.dumps(source), encoding="utf-8")
            return str(path)
        return os.fspath(source)


def plan(model: Source, topology: Source, *, timeout: float | None = None, **options: Any) -> Plan:
    """Finds the fastest layouts: `foretell plan`. `model` and `topology` are names, files or mappings."""
    with _Files() as files:
        named = [f"--model={files.of('model', model)}", f"--topology={files.of('topology', topology)}"]
        answer = document(["plan", *named, *_options(options)], timeout=timeout)
    # The files of mappings are gone; a plan may have the mappings themselves.
    for one in (answer, *answer.get("alternatives", ())):
        for name, source in (("model", model), ("topology", topology)):
            if isinstance(source, (Mapping, Record)) and isinstance(one.get("plan", {}).get(name), str):
                one["plan"][name] = source.to_dict() if isinstance(source, Record) else dict(source)
    return Plan(answer)


def simulate(plan: Source | Plan, *, timeout: float | None = None, **options: Any) -> Prediction:
    """Predicts a plan's step: `foretell simulate`. `plan` is a file, a mapping, or what `plan()` returned."""
    with _Files() as files:
        source = plan.plan if isinstance(plan, Plan) else plan
        return Prediction(document(["simulate", f"--plan={files.of('plan', source)}", *_options(options)], timeout=timeout))


def check(run: PathLike, *, timeout: float | None = None) -> Check:
    """Compares a run's prediction with its measurement: `foretell check`."""
    return Check(document(["check", os.fspath(run)], timeout=timeout))


def export(plan: Source | Plan, to: str, *, timeout: float | None = None, **options: Any) -> Record:
    """Writes a plan for another tool: `foretell export`."""
    with _Files() as files:
        source = plan.plan if isinstance(plan, Plan) else plan
        return Record(document(["export", f"--plan={files.of('plan', source)}", f"--to={to}", *_options(options)], timeout=timeout))


def models(name: str | None = None) -> Any:
    """The models of the library, or one of them."""
    return _library("models", name)


def topologies(name: str | None = None) -> Any:
    """The topologies of the library, or one of them."""
    return _library("topologies", name)


def _library(kind: str, name: str | None) -> Any:
    return _record(document([kind, "show", name] if name is not None else [kind]))


def run_command(arguments: Sequence[str], *, timeout: float | None = None) -> Any:
    """Runs any command, given as on the command line, and returns its document."""
    return _record(document(list(arguments), timeout=timeout))


def _record(answer: Any) -> Any:
    """A mapping as a record; a list as it is."""
    return Record(answer) if isinstance(answer, dict) else answer
