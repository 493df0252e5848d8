"""Pictures of documents for notebooks: bars as SVG, tables as HTML. It must not start the program."""

from __future__ import annotations

import os
from html import escape
from typing import Any, Iterable, Mapping, Sequence

# The colours of the planner's page, which tell parts apart for the colour-blind too.
COLOURS = ("#2f5fa8", "#4c8fd6", "#2a9d6f", "#e9b44c", "#c77bb0", "#b9bec5", "#7f8ea3")
MEMORY_PARTS = {
    "parameters": "parameters", "gradients": "gradients", "optimizer_state": "optimizer", "activations": "activations",
    "workspace": "workspace", "unused": "unused", "context": "driver and libraries",
}
TIME_PARTS = {
    "compute": "compute", "exposed_communication": "exposed communication", "bubble": "bubble", "data": "data",
    "optimizer": "optimizer",
}

# Sizes in pixels. A line of the key holds three parts.
WIDTH, LEFT, BAR_TOP, BAR_HEIGHT, KEY_LINE, KEY_COLUMNS = 640, 8, 30, 24, 20, 3


class Picture:
    """A picture that a notebook shows and a file can hold."""

    def __init__(self, svg: str):
        self.svg = svg

    def _repr_svg_(self) -> str:
        return self.svg

    def save(self, path: str | os.PathLike) -> None:
        """Writes the picture as an SVG file."""
        with open(path, "w", encoding="utf-8") as file:
            file.write(self.svg)

    def __repr__(self) -> str:
        return f"Picture({len(self.svg)} characters of SVG)"


def bytes_text(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.3g} {unit}"
        count /= 1024
    return f"{count:.3g} TiB"


def time_text(seconds: float) -> str:
    for least, size, unit in ((172800, 86400, "days"), (7200, 3600, "h"), (120, 60, "min"), (1, 1, "s"), (1e-3, 1e-3, "ms")):
        if seconds >= least:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs" if seconds else "0 s"


def parts_bar(title: str, parts: Sequence[tuple[str, float]], written: Any, limit: float | None = None) -> Picture:
    """A bar of parts with their key, and a mark at `limit`. The bar is as long as the larger of the parts and the limit."""
    parts = [(name, value) for name, value in parts if value and value > 0]
    total = sum(value for _, value in parts)
    scale = (WIDTH - 2 * LEFT) / max(total, limit or 0, 1e-300)
    lines = -(-len(parts) // KEY_COLUMNS)
    key_top = BAR_TOP + BAR_HEIGHT + 20
    height = key_top + lines * KEY_LINE
    said = "; ".join(f"{name} {written(value)}" for name, value in parts)
    drawn = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(title)}. {escape(said)}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="19" fill="#1f2328">{escape(title)}</text>',
        f'<rect x="{LEFT}" y="{BAR_TOP}" width="{WIDTH - 2 * LEFT}" height="{BAR_HEIGHT}" fill="#f6f8fa" stroke="#d5dae0"/>',
    ]
    at = float(LEFT)
    for index, (name, value) in enumerate(parts):
        colour = COLOURS[index % len(COLOURS)]
        drawn.append(f'<rect x="{at:.2f}" y="{BAR_TOP}" width="{value * scale:.2f}" height="{BAR_HEIGHT}" fill="{colour}"/>')
        at += value * scale
        x = LEFT + index % KEY_COLUMNS * (WIDTH - 2 * LEFT) // KEY_COLUMNS
        y = key_top + index // KEY_COLUMNS * KEY_LINE
        drawn.append(f'<rect x="{x}" y="{y - 10}" width="12" height="12" fill="{colour}"/>')
        drawn.append(f'<text x="{x + 18}" y="{y + 1}" fill="#57606a">{escape(name)} {escape(written(value))}</text>')
    if limit:
        x = LEFT + limit * scale
        drawn.append(
            f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{BAR_TOP - 4}" y2="{BAR_TOP + BAR_HEIGHT + 4}" stroke="#b42318" '
            'stroke-width="2" stroke-dasharray="4 3"/>'
        )
    return Picture("".join([*drawn, "</svg>"]))


def fullest_stage(prediction: Mapping[str, Any]) -> int:
    peaks = prediction["peak_memory_bytes"]
    return max(range(len(peaks)), key=peaks.__getitem__)


def memory_bar(prediction: Mapping[str, Any], limit: float | None) -> Picture | None:
    """The memory of the fullest device by part, beside what the device has. `None` where the parts are not known."""
    stage = fullest_stage(prediction)
    parts = prediction.get("memory_by_component") or []
    if stage >= len(parts):
        return None
    held = bytes_text(prediction["peak_memory_bytes"][stage])
    whose = f"the fullest device, in stage {stage} of {len(parts)}" if len(parts) > 1 else "a device"
    title = f"Memory of {whose}: {held}" + (f" of {bytes_text(limit)}" if limit else "")
    return parts_bar(title, [(shown, parts[stage].get(name, 0)) for name, shown in MEMORY_PARTS.items()], bytes_text, limit)


def time_bar(prediction: Mapping[str, Any]) -> Picture:
    """The step's time by kind."""
    parts = prediction["breakdown_seconds"]
    title = f"Where the step's {time_text(prediction['step_seconds'])} go"
    return parts_bar(title, [(shown, parts.get(name, 0)) for name, shown in TIME_PARTS.items()], time_text)


def sentences(prediction: Mapping[str, Any]) -> list[str]:
    """What a prediction says, a sentence each."""
    chance = prediction.get("chance_of_running_out")
    fits = "It fits" if prediction["fits"] else "It does not fit"
    said = [fits + (f"; the chance of running out of memory is {chance:.0%}" if chance is not None else "")]
    interval = f"{time_text(prediction['step_seconds_p10'])} to {time_text(prediction['step_seconds_p90'])} in 8 of 10 cases"
    said.append(f"A step takes {time_text(prediction['step_seconds'])} ({interval})")
    tokens = prediction.get("tokens_per_second")
    rate = f"{tokens:,.0f} tokens/s" if tokens is not None else f"{prediction['samples_per_second']:,.1f} samples/s"
    said.append(f"{rate}, MFU {prediction['mfu']:.1%}")
    return [f"{sentence}." for sentence in said]


def prediction_html(prediction: Mapping[str, Any], limit: float | None) -> str:
    bars = [bar.svg for bar in (memory_bar(prediction, limit), time_bar(prediction)) if bar is not None]
    said = " ".join(map(escape, sentences(prediction)))
    return f"<p>{said}</p>{''.join(f'<div>{bar}</div>' for bar in bars)}"


def table_html(head: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{body}</tbody></table>"
