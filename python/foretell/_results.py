"""The commands' documents as objects. A field that this version does not name is an attribute all the same."""

from __future__ import annotations

from html import escape
from typing import Any, Iterator


class Record:
    """A document: fields are attributes, of nested documents too."""

    _nested: dict[str, type] = {}

    def __init__(self, document: dict[str, Any]):
        self._document = document

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._document:
            raise AttributeError(f"`{type(self).__name__}` has no `{name}`; it has {', '.join(self._document)}")
        value = self._document[name]
        return self._nested.get(name, Record)(value) if isinstance(value, dict) else value

    def __getitem__(self, name: str) -> Any:
        return self._document[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._document)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._document]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Record) and self._document == other._document

    __hash__ = None  # type: ignore[assignment]

    def to_dict(self) -> dict[str, Any]:
        """The document as the program wrote it."""
        return self._document

    def __repr__(self) -> str:
        fields = (f"{name}={value!r}" for name, value in self._document.items() if not isinstance(value, (dict, list)))
        return f"{type(self).__name__}({', '.join(fields)})"

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr><td>{escape(name)}</td><td>{escape(_short(value))}</td></tr>" for name, value in self._document.items()
        )
        return f"<table><tbody>{rows}</tbody></table>"


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 120 else text[:119] + "…"


class Breakdown(Record):
    """A step's time by kind, in seconds."""

    compute: float
    exposed_communication: float
    bubble: float
    data: float
    optimizer: float


class Prediction(Record):
    """A predicted step. Times are in seconds, sizes in bytes."""

    step_seconds: float
    step_seconds_p10: float
    step_seconds_p90: float
    samples_per_second: float
    tokens_per_second: float | None
    model_flops_per_device_per_second: float
    mfu: float
    hfu: float
    peak_memory_bytes: list[int]
    fits: bool
    breakdown_seconds: Breakdown
    calibrated: bool
    events: int
    simulated_ranks: int
    wall_seconds: float

    _nested = {"breakdown_seconds": Breakdown}


class Search(Record):
    """What a search did."""

    layouts: int
    bounded_out: int
    out_of_memory: int
    simulated: int
    best_seconds: float
    lower_bound_seconds: float
    gap: float
    wall_seconds: float


class Plan(Record):
    """The best plan, its prediction, and the alternatives."""

    predicted: Prediction
    search: Search

    _nested = {"predicted": Prediction, "search": Search}

    @property
    def plan(self) -> dict[str, Any]:
        """The plan, as a plan file has it: a plain dictionary, to be changed and simulated."""
        return self._document["plan"]

    @property
    def alternatives(self) -> list[Plan]:
        """The next best plans."""
        return [Plan(document) for document in self._document["alternatives"]]


class Check(Record):
    """A run's prediction against its measurement."""

    predicted_step_seconds: float
    measured_step_seconds: float
    error: float
    inside_interval: bool
    memory_error: float | None
    by_kind: list[dict[str, Any]]
    worst: list[dict[str, Any]]
