"""Geometry of the plots: numbers in, percentages out. The templates draw them as inline SVG and HTML.

Lines are drawn in a stretched 100 x 100 viewBox and labels are ordinary text beside it, so a plot keeps its
text size on a phone and its colours follow the reader's colour scheme.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .values import number


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
    """A heat map with labelled rows; `shown_columns` are the labels there is room for."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: tuple[Cell, ...]
    note: str
    shown_columns: tuple[Tick, ...]


class _Point(NamedTuple):
    """A point of a series in the units of its axes; `low` is the far edge of the band, if there is one."""

    x: float
    y: float
    text: str
    low: float | None = None


@dataclass(frozen=True)
class _Axis:
    """Range, labels (value and text) and title of an axis."""

    low: float
    high: float
    labels: Iterable[tuple[float, str]]
    title: str = ""

    def percent(self, value: float) -> float:
        return 50.0 if self.high == self.low else 100.0 * (value - self.low) / (self.high - self.low)


#: Relative span of an axis below which its ticks would be the same number.
FINEST_SPAN = 1e-10
#: The axis of cosines shows at least this much below 1: two equal sides differ by 1e-16 or by nothing.
FINEST_COSINE = 1e-6
#: Labels that the axis of layers or steps has room for.
MOST_LABELS = 8


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


def _every(count: int) -> int:
    return max(1, math.ceil(count / MOST_LABELS))


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{'M' if i == 0 else 'L'}{x:.2f} {y:.2f}" for i, (x, y) in enumerate(points))


def _line_plot(series: Iterable[tuple[str, Sequence[_Point]]], x: _Axis, y: _Axis) -> LinePlot:
    lines = []
    for place, (name, points) in enumerate(series):
        dots = tuple(Dot(x.percent(point.x), 100.0 - y.percent(point.y), point.text) for point in points)
        upper = [(dot.x, dot.y) for dot in dots]
        lower = [(x.percent(p.x), 100.0 - y.percent(p.low)) for p in points if p.low is not None]
        band = _path(upper + lower[::-1]) + " Z" if len(lower) > 1 else ""
        lines.append(Line(name, f"series{place % 3}", _path(upper), band, dots))
    return LinePlot(
        tuple(lines),
        tuple(Tick(x.percent(value), text) for value, text in x.labels),
        tuple(Tick(100.0 - y.percent(value), text) for value, text in y.labels),
        x.title,
    )


def cosine_plot(rows: Sequence[Mapping[str, Any]]) -> LinePlot | None:
    """Median cosine per layer for prefill and decode, with a band down to the worst position.

    `rows`: of a `diagnosis` record. None when there is nothing to draw.
    """
    series: dict[str, list[_Point]] = {}
    values = [1.0, 1.0 - FINEST_COSINE]
    for row in rows:
        layer, median = number(row.get("layer")), number(row.get("cos_median"))
        if layer is None or median is None:
            continue
        worst = number(row.get("cos_min"))
        worst = median if worst is None else worst
        where = f"{row.get('path')} layer {layer:.0f} ({row.get('probe')})"
        text = f"{where}: median {median:.6f}, worst {worst:.6f}"
        series.setdefault(str(row.get("path")), []).append(_Point(layer, median, text, worst))
        values += [median, worst]
    if not series:
        return None
    layers = [point.x for points in series.values() for point in points]
    first, last = min(layers), max(layers)
    labels = range(int(first), int(last) + 1, _every(math.ceil(last - first)))
    ticks = nice_ticks(min(values), max(values))
    places = max(2, len(f"{ticks[1] - ticks[0]:.9f}".rstrip("0").partition(".")[2]))
    return _line_plot(
        [(name, sorted(points)) for name, points in sorted(series.items(), reverse=True)],
        _Axis(first, last, [(layer, str(layer)) for layer in labels], "layer"),
        _Axis(ticks[0], ticks[-1], [(tick, f"{tick:.{places}f}") for tick in ticks]),
    )


def step_plot(series: Sequence[tuple[str, Sequence[Any]]], floor: float = 1e-6) -> LinePlot | None:
    """A value per step on a logarithmic axis; what is below `floor` is drawn there. None without values."""
    curves = []
    for name, values in series:
        plain = [(step, value) for step, entry in enumerate(values) if (value := number(entry)) is not None]
        points = [
            _Point(step, math.log10(max(value, floor)), f"{name}, step {step}: {value:.3g}")
            for step, value in plain
        ]
        curves += [(name, points)] if points else []
    if not curves:
        return None
    powers = [point.y for _, points in curves for point in points]
    low = math.floor(min(powers))
    high = max(math.ceil(max(powers)), low + 1)
    last = int(max(1, *(points[-1].x for _, points in curves)))
    return _line_plot(
        curves,
        _Axis(0, last, [(step, str(step)) for step in range(0, last + 1, _every(last))], "generated token"),
        _Axis(low, high, [(power, f"1e{power}") for power in range(low, high + 1)]),
    )


def breakdown_bars(rows: Sequence[Mapping[str, Any]], whole: float, limit: int = 12) -> list[Bar]:
    """Bars of the largest entries of a breakdown, the rest summed up in one bar.

    Times in ms; `whole` is what the shares refer to.
    """
    timed = [(row, total) for row in rows if (total := number(row.get("total_ms"))) is not None]
    timed.sort(key=lambda pair: -pair[1])
    if not timed or timed[0][1] <= 0 or whole <= 0:
        return []
    if len(timed) == limit + 1:
        limit += 1  # a bar for one other entry can as well be that entry
    widest = timed[0][1]

    def bar(label: str, kind: str, total: float, note: str = "") -> Bar:
        share = 100 * total / whole
        percent = f"{share:.0f} %" if share >= 0.5 else "< 1 %"
        return Bar(label, kind, 100.0 * min(1.0, total / widest), f"{total:.2f} ms, {percent}", note)

    bars = []
    for row, total in timed[:limit]:
        calls, kind = row.get("calls"), str(row.get("kind"))
        note = f"{calls} call{'' if calls == 1 else 's'}" if calls else ""
        verb = {"bo_read": "read ", "bo_write": "write "}.get(kind, "")
        bars.append(bar(verb + str(row.get("name")), kind, total, note))
    rest = sum(total for _, total in timed[limit:])
    return [*bars, bar(f"{len(timed) - limit} others", "rest", rest)] if rest else bars


def cache_heat_maps(payload: Mapping[str, Any], limits: Mapping[str, float] | None = None) -> list[HeatMap]:
    """Heat maps of a `cache_check` record: worst cosine per layer and head, one map for K and one for V.

    `limits`: largest distance of the cosine to 1 that is allowed, by tensor (`k`, `v`).

    The colour is the logarithm of the distance to 1, from 1e-6 (good) to 1 (no relation at all).
    """
    limits, maps = limits or {}, []
    rows = payload.get("rows") or _worst_of_prompts(payload.get("prompts") or [])
    for tensor in sorted({str(row.get("tensor")) for row in rows}):
        matrix = [
            (int(row["layer"]), int(row["head"]), row) for row in rows if str(row.get("tensor")) == tensor
        ]
        layers = sorted({layer for layer, _, _ in matrix})
        heads = sorted({head for _, head, _ in matrix})
        cells = []
        for layer, head, row in matrix:
            cosine = number(row.get("cos_min"))
            distance = 2.0 if cosine is None else 1.0 - cosine
            heat = min(1.0, max(0.0, (math.log10(max(distance, 1e-12)) + 6.0) / 6.0))
            over = cosine is None or distance > limits.get(tensor, 2.0)
            text = (
                f"layer {layer}, head {head}: cosine {row.get('cos_min')}, norm ratio {row.get('norm_ratio')}"
            )
            cells.append(Cell(heads.index(head), layers.index(layer), heat, text, over))
        columns = tuple(map(str, layers))
        ticks = [Tick(100.0 * (i + 0.5) / len(layers), name) for i, name in enumerate(columns)]
        maps.append(
            HeatMap(
                f"{tensor.upper()} cache: worst cosine of any position, per layer and head",
                tuple(f"head {head}" for head in heads),
                columns,
                tuple(cells),
                f"limit {1.0 - limits[tensor]:.4g}" if tensor in limits else "",
                tuple(ticks[:: _every(len(layers))]),
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
                    before = worst.get((tensor, layer, head))
                    if before is not None and not _is_worse(cosine, before["cos_min"]):
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


def sparkline(values: Sequence[float]) -> str:
    """SVG path of a trend in a 100 x 100 viewBox; empty for fewer than two values.

    The height stands for at least 5 % of the largest value, so that noise does not look like a trend.
    """
    if len(values) < 2:
        return ""
    low, high = min(values), max(values)
    span = max(high - low, 0.05 * abs(high)) or 1.0
    middle = (high + low) / 2
    return _path(
        [
            (100.0 * i / (len(values) - 1), 50.0 - 80.0 * (value - middle) / span)
            for i, value in enumerate(values)
        ]
    )
