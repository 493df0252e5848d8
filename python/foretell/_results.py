"""The commands' documents as objects. A field that this version does not name is an attribute all the same."""

from __future__ import annotations

from html import escape
from typing import Any, Callable, Iterator

from . import _views
from ._views import Picture


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
        return _views.table_html((), ((name, _short(value)) for name, value in self._document.items()))


def _short(value: Any) -> str:
    text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 120 else text[:119] + "…"


def _frame(rows: list[dict[str, Any]]) -> Any:
    try:
        import pandas
    except ImportError:
        raise ImportError("`to_frame` needs pandas: install it with `pip install pandas`") from None
    return pandas.DataFrame(rows)


class Breakdown(Record):
    """A step's time by kind, in seconds."""

    compute: float
    exposed_communication: float
    bubble: float
    data: float
    optimizer: float


class Prediction(Record):
    """A predicted step. Times are in seconds, sizes in bytes. A notebook shows it with its bars."""

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

    def __init__(self, document: dict[str, Any], device_memory: Callable[[], float | None] = lambda: None):
        super().__init__(document)
        self._device_memory = device_memory

    def memory_bar(self) -> Picture | None:
        """The memory of the fullest device by part, with the device's own memory marked. `None` if the parts are not known."""
        return _views.memory_bar(self._document, self._device_memory())

    def time_bar(self) -> Picture:
        """The step's time by kind."""
        return _views.time_bar(self._document)

    def _repr_html_(self) -> str:
        fields = super()._repr_html_()
        view = _views.prediction_html(self._document, self._device_memory())
        return f"{view}<details><summary>All fields</summary>{fields}</details>"


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


class Moment(Record):
    """How far a search is. `best` and `bound` are seconds of a step, or what the objective asks for; `None` before the first."""

    seconds: float
    best: float | None
    bound: float | None
    simulated: int

    def __str__(self) -> str:
        best = f", best {_views.time_text(self.best)}" if self.best else ""
        above = f", at most {self.best / self.bound - 1:.1%} above the best possible" if self.best and self.bound else ""
        return f"{self.seconds:.1f} s: {self.simulated} layouts simulated{best}{above}"


class Plan(Record):
    """The best plan, its prediction, and the alternatives."""

    search: Search

    _nested = {"search": Search}

    def __init__(self, document: dict[str, Any], device_memory: Callable[[], float | None] = lambda: None):
        super().__init__(document)
        self._device_memory = device_memory

    @property
    def plan(self) -> dict[str, Any]:
        """The plan, as a plan file has it: a plain dictionary, to be changed and simulated."""
        return self._document["plan"]

    @property
    def predicted(self) -> Prediction:
        """The plan's step."""
        return Prediction(self._document["predicted"], self._device_memory)

    @property
    def alternatives(self) -> list[Plan]:
        """The next best plans."""
        return [Plan(document, self._device_memory) for document in self._document["alternatives"]]

    def __repr__(self) -> str:
        said = " ".join(_views.sentences(self._document["predicted"]))
        return f"Plan({said} {len(self._document.get('alternatives', ()))} alternatives)"

    def rows(self) -> list[dict[str, Any]]:
        """A row for the best plan and each alternative: its figures, and its layout's fields after `layout.`."""
        return [_row(one) for one in (self._document, *self._document.get("alternatives", ()))]

    def to_frame(self) -> Any:
        """The rows as a `pandas.DataFrame`."""
        return _frame(self.rows())

    def _repr_html_(self) -> str:
        head, rows = _differing(self.rows())
        search = self._document.get("search", {})
        certain = "" if search.get("gap") is None else f"<p>No layout is more than {search['gap']:.2%} faster.</p>"
        return f"{self.predicted._repr_html_()}{_views.table_html(head, rows)}{certain}"


def _row(answer: dict[str, Any]) -> dict[str, Any]:
    plan, predicted = answer["plan"], answer["predicted"]
    names = ("step_seconds", "step_seconds_p10", "step_seconds_p90", "samples_per_second", "tokens_per_second", "mfu", "fits")
    row = {name: predicted.get(name) for name in names}
    row["peak_memory_bytes"] = max(predicted["peak_memory_bytes"])
    row["chance_of_running_out"] = predicted.get("chance_of_running_out")
    row["precision"], row["global_batch"] = plan.get("precision"), plan.get("global_batch")
    return {**row, **{f"layout.{name}": value for name, value in plan["layout"].items()}}


def _differing(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """The figures of layouts as texts, and only those fields of layouts that are not the same in all."""
    names = [name for row in rows for name in row if name.startswith("layout.")]
    names = [name for name in dict.fromkeys(names) if len({str(row.get(name)) for row in rows}) > 1]
    texts = [
        [
            _views.time_text(row["step_seconds"]),
            _views.bytes_text(row["peak_memory_bytes"]),
            *(_short(row.get(name, "")) for name in names),
        ]
        for row in rows
    ]
    return ["step", "memory", *(name.split(".", 1)[1].replace("_", " ") for name in names)], texts


class Table(Record):
    """What fits: the answer of `plan(..., table="context,method")`."""

    cells: list[dict[str, Any]]

    def to_frame(self) -> Any:
        """The cells as a `pandas.DataFrame`, a row each."""
        return _frame(self._document["cells"])

    def _repr_html_(self) -> str:
        cells = self._document["cells"]
        columns = list(dict.fromkeys(cell["column"] for cell in cells))
        by_place = {(cell["row"], cell["column"]): cell for cell in cells}
        rows = ([row, *(_cell(by_place[row, column]) for column in columns)] for row in dict.fromkeys(cell["row"] for cell in cells))
        return _views.table_html([escape(self._document["rows"]), *columns], rows)


def _cell(cell: dict[str, Any]) -> str:
    if cell["memory_bytes"] is None:
        return "not planned"
    memory = _views.bytes_text(cell["memory_bytes"])
    return f"{memory}, {cell['rate']:,.0f}/s" if cell["fits"] else f"needs {memory}"


class Check(Record):
    """A run's prediction against its measurement."""

    predicted_step_seconds: float
    measured_step_seconds: float
    error: float
    inside_interval: bool
    memory_error: float | None
    by_kind: list[dict[str, Any]]
    worst: list[dict[str, Any]]
