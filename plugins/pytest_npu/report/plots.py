"""Geometry of the plots: numbers in, percentages out. The templates draw them as inline SVG and HTML.

Lines are drawn in a stretched 100 x 100 viewBox and labels are ordinary text beside it, so a plot keeps its
text size on a phone and its colours follow the reader's colour scheme.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Tick:
    """A label on an axis; `at` in percent of the axis, from the left or from the top."""

    at: float
    text: str


@dataclass(frozen=True)
class Dot:
    """A data point with the text of its tooltip; coordinates in percent, y from the top."""

    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Line:
    """One series: SVG path of the line, of the band around it (or empty), and its points."""

    name: str
    css: str
    path: str
    band: str
    dots: tuple[Dot, ...]


@dataclass(frozen=True)
class LinePlot:
    """A plot of series over one x axis."""

    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    x_title: str
    y_title: str


@dataclass(frozen=True)
class Bar:
    """One bar of a breakdown; `width` in percent of the widest."""

    label: str
    kind: str
    width: float
    value: str
    note: str


@dataclass(frozen=True)
class Cell:
    """One field of a heat map; `heat` from 0 (equal) to 1 (no relation), `over` beyond the limit."""

    row: int
    column: int
    heat: float
    text: str
    over: bool = False


@dataclass(frozen=True)
class HeatMap:
    """A heat map with labelled rows and columns."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    note: str = ""
    legend: tuple[str, ...] = ()
    shown_columns: tuple[Tick, ...] = field(default=())


#: Relative span of an axis below which its ticks would be the same number.
FINEST_SPAN = 1e-10
#: The axis of cosines shows at least this much below 1: two equal sides differ by 1e-16 or by nothing.
FINEST_COSINE = 1e-6


def number(value: Any) -> float | None:
    """A finite float, or None for missing values and for the texts `nan` and `inf` of the event log."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if math.isfinite(value) else None


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers that cover low..high; a span that doubles cannot divide counts as none."""
    if high - low <= FINEST_SPAN * max(1.0, abs(high)):
        high = low + 1.0
    raw = (high - low) / max(1, count - 1)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1.0, 2.0, 2.5, 5.0, 10.0) if m * power >= raw * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{'M' if i == 0 else 'L'}{x:.2f} {y:.2f}" for i, (x, y) in enumerate(points))


def cosine_plot(rows: Sequence[Mapping[str, Any]]) -> LinePlot | None:
    """Median cosine per layer for prefill and decode, with a band down to the worst position.

    `rows`: of a `diagnosis` record. None when there is nothing to draw.
    """
    series: dict[str, list[tuple[float, float, float, str]]] = {}
    for row in rows:
        layer, median = number(row.get("layer")), number(row.get("cos_median"))
        if layer is None or median is None:
            continue
        worst = number(row.get("cos_min"))
        worst = median if worst is None else worst
        where = f"{row.get('path')} layer {layer:.0f} ({row.get('probe')})"
        text = f"{where}: median {median:.6f}, worst {worst:.6f}"
        series.setdefault(str(row.get("path")), []).append((layer, median, worst, text))
    if not series:
        return None
    values = [value for points in series.values() for point in points for value in point[1:3]]
    layers = [point[0] for points in series.values() for point in points]
    ticks = nice_ticks(min(*values, 1.0 - FINEST_COSINE), max(1.0, max(values)))
    low, high = ticks[0], ticks[-1]
    first, last = min(layers), max(layers)

    def at_x(layer: float) -> float:
        return 50.0 if last == first else 100.0 * (layer - first) / (last - first)

    def at_y(value: float) -> float:
        return 100.0 * (high - value) / (high - low)

    lines = []
    for place, (name, points) in enumerate(sorted(series.items(), reverse=True)):
        points.sort()
        top = [(at_x(layer), at_y(median)) for layer, median, _, _ in points]
        bottom = [(at_x(layer), at_y(worst)) for layer, _, worst, _ in points]
        dots = tuple(Dot(x, y, point[3]) for (x, y), point in zip(top, points, strict=True))
        band = _path(top + bottom[::-1]) + " Z" if len(points) > 1 else ""
        lines.append(Line(name, f"series{place % 3}", _path(top), band, dots))
    digits = max(2, len(f"{ticks[1] - ticks[0]:.9f}".rstrip("0").partition(".")[2]))
    step = max(1, math.ceil((last - first) / 8))
    x_labels = range(int(first), int(last) + 1, step)
    return LinePlot(
        tuple(lines),
        tuple(Tick(at_x(layer), str(layer)) for layer in x_labels),
        tuple(Tick(at_y(tick), f"{tick:.{digits}f}") for tick in ticks),
        "layer",
        "cosine to the reference",
    )


def step_plot(series: Sequence[tuple[str, Sequence[Any]]], floor: float = 1e-6) -> LinePlot | None:
    """A value per step on a logarithmic axis; what is below `floor` is drawn there. None without values."""
    known = [
        (name, [(step, value) for step, entry in enumerate(values) if (value := number(entry)) is not None])
        for name, values in series
    ]
    known = [(name, points) for name, points in known if points]
    if not known:
        return None
    logs = [math.log10(max(value, floor)) for _, points in known for _, value in points]
    low, high = math.floor(min(logs)), max(math.ceil(max(logs)), math.floor(min(logs)) + 1)
    last = max(1, max(step for _, points in known for step, _ in points))
    lines = []
    for place, (name, points) in enumerate(known):
        dots = tuple(
            Dot(
                100.0 * step / last,
                100.0 * (high - math.log10(max(value, floor))) / (high - low),
                f"{name}, step {step}: {value:.3g}",
            )
            for step, value in points
        )
        path = _path([(dot.x, dot.y) for dot in dots])
        lines.append(Line(name, f"series{place % 3}", path, "", dots))
    every = max(1, math.ceil(last / 8))
    return LinePlot(
        tuple(lines),
        tuple(Tick(100.0 * step / last, str(step)) for step in range(0, last + 1, every)),
        tuple(Tick(100.0 * (high - power) / (high - low), f"1e{power}") for power in range(low, high + 1)),
        "generated token",
        "KL",
    )


def breakdown_bars(rows: Sequence[Mapping[str, Any]], whole: float, limit: int = 12) -> list[Bar]:
    """Bars of the largest entries of a breakdown, the rest summed up in one bar.

    Times in ms; `whole` is what the shares refer to.
    """
    known = [(row, total) for row in rows if (total := number(row.get("total_ms"))) is not None]
    known.sort(key=lambda pair: -pair[1])
    if not known or known[0][1] <= 0 or whole <= 0:
        return []
    if len(known) == limit + 1:
        limit += 1  # a bar for one other entry can as well be that entry
    bars = []
    widest = known[0][1]
    for row, total in known[:limit]:
        calls = row.get("calls")
        note = f"{calls} call{'' if calls == 1 else 's'}" if calls else ""
        kind = str(row.get("kind"))
        verb = {"bo_read": "read ", "bo_write": "write "}.get(kind, "")
        label = verb + str(row.get("name"))
        bars.append(Bar(label, kind, 100.0 * total / widest, _share(total, whole), note))
    rest = sum(total for _, total in known[limit:])
    if rest:
        width = 100.0 * min(1.0, rest / widest)
        bars.append(Bar(f"{len(known) - limit} others", "rest", width, _share(rest, whole), ""))
    return bars


def _share(total: float, whole: float) -> str:
    percent = 100 * total / whole
    return f"{total:.2f} ms, {percent:.0f} %" if percent >= 0.5 else f"{total:.2f} ms, < 1 %"


def cache_heat_maps(payload: Mapping[str, Any], limits: Mapping[str, float] | None = None) -> list[HeatMap]:
    """Heat maps of a `cache_check` record: worst cosine per layer and head, one map for K and one for V.

    `limits`: largest distance of the cosine to 1 that is allowed, by tensor (`k`, `v`).

    The colour is the logarithm of the distance to 1, from 1e-6 (good) to 1 (no relation at all).
    """
    maps = []
    rows = payload.get("rows") or _worst_of_prompts(payload.get("prompts") or [])
    for tensor in sorted({str(row.get("tensor")) for row in rows}):
        mine = [row for row in rows if str(row.get("tensor")) == tensor]
        layers = sorted({int(row["layer"]) for row in mine})
        heads = sorted({int(row["head"]) for row in mine})
        cells = []
        for row in mine:
            cosine, ratio = number(row.get("cos_min")), row.get("norm_ratio")
            heat = 1.0 if cosine is None else _log_heat(1.0 - cosine)
            over = cosine is None or 1.0 - cosine > (limits or {}).get(tensor, 2.0)
            text = (
                f"layer {row['layer']}, head {row['head']}: cosine {row.get('cos_min')}, norm ratio {ratio}"
            )
            cells.append(
                Cell(heads.index(int(row["head"])), layers.index(int(row["layer"])), heat, text, over)
            )
        step = max(1, math.ceil(len(layers) / 8))
        shown = tuple(
            Tick(100.0 * (i + 0.5) / len(layers), str(layers[i])) for i in range(0, len(layers), step)
        )
        maps.append(
            HeatMap(
                f"{tensor.upper()} cache: worst cosine of any position, per layer and head",
                tuple(f"head {head}" for head in heads),
                tuple(str(layer) for layer in layers),
                tuple(cells),
                f"limit {1.0 - limits[tensor]:.4g}" if limits and tensor in limits else "",
                ("1 - 1e-6", "1 - 1e-4", "1 - 1e-2", "0"),
                shown,
            )
        )
    return maps


def _worst_of_prompts(prompts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows per layer and head from matrices [layer][head] of each prompt: the worst prompt counts."""
    worst: dict[tuple[str, int, int], dict[str, Any]] = {}
    for prompt in prompts:
        for tensor, name in (("k", "key"), ("v", "value")):
            ratios = prompt.get(f"{name}_worst_ratio") or []
            for layer, heads in enumerate(prompt.get(f"{name}_min_cosine") or []):
                for head, cosine in enumerate(heads):
                    known = worst.get((tensor, layer, head))
                    if known is not None and not _is_worse(cosine, known["cos_min"]):
                        continue
                    try:
                        ratio = ratios[layer][head]
                    except (IndexError, TypeError):
                        ratio = None
                    row = {"tensor": tensor, "layer": layer, "head": head, "cos_min": cosine}
                    worst[tensor, layer, head] = {**row, "norm_ratio": ratio}
    return list(worst.values())


def _is_worse(cosine: Any, than: Any) -> bool:
    new, old = number(cosine), number(than)
    return new is None or (old is not None and new < old)


def _log_heat(distance: float) -> float:
    return min(1.0, max(0.0, (math.log10(max(distance, 1e-12)) + 6.0) / 6.0))


def sparkline(values: Sequence[float]) -> str:
    """SVG path of a trend in a 100 x 100 viewBox; empty for fewer than two values.

    The height stands for at least 5 % of the largest value, so that noise does not look like a trend.
    """
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    span = max(high - low, 0.05 * abs(high)) or 1.0
    middle = (high + low) / 2
    points = [
        (100.0 * i / (len(values) - 1), 50.0 - 80.0 * (value - middle) / span)
        for i, value in enumerate(values)
    ]
    return _path(points)
