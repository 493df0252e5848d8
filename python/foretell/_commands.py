"""One function a command. Options are those of the command line, which alone knows them."""

from __future__ import annotations

import enum
import functools
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any, Callable, Mapping, Sequence, Union

from ._program import ForetellError, Running, document
from ._progress import last_moment, show_progress
from ._results import Check, Moment, Plan, Prediction, Record, Table
from ._views import Picture

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

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="foretell-")

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._folder.cleanup()

    def path(self, name: str) -> Path:
        return Path(self._folder.name) / name

    def of(self, name: str, source: Source) -> str:
        if isinstance(source, Record):
            source = source.to_dict()
        if isinstance(source, Mapping):
            path = self.path(f"{name}.yaml")
            path.write_text(json.dumps(source), encoding="utf-8")
            return str(path)
        return os.fspath(source)


def plan(model: Source, topology: Source, *, timeout: float | None = None,
         progress: bool | Callable[[Moment], None] = False, **options: Any) -> Any:
    """Finds the fastest layouts: `foretell plan`. `model` and `topology` are names, files or mappings.

    The answer is a `Plan`, with `table=...` a `Table`. `progress=True` shows how far the search is; a function is called with
    each `Moment`. An interrupt ends the search.
    """
    watch = show_progress() if progress is True else progress or None
    with _start(model, topology, options, Followed.SEARCH if watch else Followed.NOTHING) as running:
        return running.result(timeout, watch)


def start_plan(model: Source, topology: Source, **options: Any) -> Running[Any]:
    """Starts `plan` and returns at once: the search can be followed, cancelled and waited for."""
    has_many = any(options.get(name) for name in MANY_SEARCHES) or options.get("method") in ("grpo", "ppo")
    return _start(model, topology, options, Followed.NOTHING if has_many else Followed.SEARCH)


# Options with which `plan` makes many searches, whose progress it does not write.
MANY_SEARCHES = ("table", "scaling", "front", "gpus_needed")


class Followed(enum.Enum):
    """Whether a search writes its progress."""

    NOTHING = enum.auto()
    SEARCH = enum.auto()


def _start(model: Source, topology: Source, options: Mapping[str, Any], followed: Followed) -> Running[Any]:
    files = _Files()
    arguments = ["plan", f"--model={files.of('model', model)}", f"--topology={files.of('topology', topology)}"]
    moments = files.path("progress.jsonl")
    if followed is Followed.SEARCH:
        arguments.append(f"--progress={moments}")

    def finish(answer: Any) -> Any:
        # The files of mappings are gone; a plan may have the mappings themselves.
        for one in (answer, *answer.get("alternatives", ())):
            for name, source in (("model", model), ("topology", topology)):
                if isinstance(source, (Mapping, Record)) and isinstance(one.get("plan", {}).get(name), str):
                    one["plan"][name] = source.to_dict() if isinstance(source, Record) else dict(source)
        if "cells" in answer:
            return Table(answer)
        return Plan(answer, _device_memory(topology)) if "plan" in answer else Record(answer)

    return Running([*arguments, *_options(options)], finish, latest=lambda: last_moment(moments), close=files.close)


def simulate(plan: Source | Plan, *, timeout: float | None = None, **options: Any) -> Prediction:
    """Predicts a plan's step: `foretell simulate`. `plan` is a file, a mapping, or what `plan()` returned."""
    with _Files() as files:
        source = plan.plan if isinstance(plan, Plan) else plan
        answer = document(["simulate", f"--plan={files.of('plan', source)}", *_options(options)], timeout=timeout)
    topology = source.to_dict().get("topology") if isinstance(source, Record) else None
    topology = source.get("topology") if isinstance(source, Mapping) else topology
    return Prediction(answer, _device_memory(topology) if topology else lambda: None)


def draw(plan: Source | Plan, what: str = "timeline", *, timeout: float | None = None, **options: Any) -> Picture:
    """Draws a plan's step: its `timeline`, or the `memory` over it."""
    if what not in ("timeline", "memory"):
        raise ValueError(f"`{what}` is no picture of a step: `timeline` or `memory`")
    with _Files() as files:
        source = plan.plan if isinstance(plan, Plan) else plan
        folder = files.path("plots")
        document(["simulate", f"--plan={files.of('plan', source)}", f"--plots={folder}", *_options(options)], timeout=timeout)
        return Picture((folder / f"{what}.svg").read_text(encoding="utf-8"))


def _device_memory(topology: Source) -> Callable[[], float | None]:
    """Asks for the memory of a topology's smallest device when it is first needed; `None` if it is not known."""

    @functools.lru_cache(maxsize=None)
    def asked() -> float | None:
        try:
            with _Files() as files:
                devices = document(["topologies", "show", files.of("topology", topology)]).get("devices", {})
        except (ForetellError, OSError):
            return None
        return min((size for size in (_size(device.get("memory")) for device in devices.values()) if size), default=None)

    return asked


def _size(text: Any) -> float | None:
    """The bytes of a size such as `80GiB`."""
    found = re.fullmatch(r"([\d.]+)\s*([KMGT]?)(i?)B", str(text))
    return float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2] or " ") if found else None


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
