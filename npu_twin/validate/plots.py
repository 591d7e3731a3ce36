"""Plots of predicted against measured times, as SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from npu_twin.validate.latency import KernelResult, ModelsResult
from npu_twin.validate.report import write_atomically

Points = Mapping[str, Sequence[tuple[float, float]]]
"""Measured and predicted value of each point, by label."""

_ORIGIN = "twin (modelled) against measurements"
_SIZE, _LEFT, _TOP, _EDGE = 360, 60, 46, 306
_COLOURS = ("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd", "#8c564b", "#17becf", "#7f7f7f")


def write(folder: Path, kernels: Sequence[KernelResult], models: ModelsResult) -> list[Path]:
    """Write one plot per judged kernel and one for the models; return the files."""
    plots: dict[str, list[str]] = {}
    for kernel in kernels:
        if kernel.judged and kernel.results:
            title = f"{kernel.name}: median {kernel.quantile(0.5):.1%}, p90 {kernel.quantile(0.9):.1%}"
            plots[f"latency_{kernel.name}"] = [_panel(title, "us", _kernel_points(kernel), 0.10)]
    panels = []
    for quantity, title, unit in (
        ("ttft_s", "time to first token", "s"),
        ("decode_ms_per_token", "time per output token", "ms"),
    ):
        figures = {r.record.id: r.figures()[quantity] for r in models.results if quantity in r.figures()}
        if figures:
            points = {name: [(published, predicted)] for name, (predicted, published, _) in figures.items()}
            panels.append(_panel(title, unit, points, 0.12))
    if panels:
        plots["models"] = panels
    folder.mkdir(parents=True, exist_ok=True)
    for name, parts in plots.items():
        write_atomically(folder / f"{name}.svg", _document(parts))
    return [folder / f"{name}.svg" for name in plots]


def _kernel_points(kernel: KernelResult) -> Points:
    points: dict[str, list[tuple[float, float]]] = {}
    for result in kernel.results:
        label = result.row.kernel if result.row.kernel != kernel.name else result.row.call.method or "all"
        label = f"{label}, {result.row.scope}" if result.row.scope != "alone" else label
        if result.excepted:
            label = "table entry, not judged"
        points.setdefault(label, []).append((result.row.measured_us, result.predicted_us))
    return dict(sorted(points.items()))


def _panel(title: str, unit: str, points: Points, share: float) -> str:
    """A square with logarithmic axes, the diagonal, a band of `share` around it, points and a legend."""
    values = [value for pairs in points.values() for pair in pairs for value in pair]
    low, high = min(values) * 0.8, max(values) * 1.25

    def at(value: float) -> float:
        return _EDGE * math.log(value / low) / math.log(high / low)

    def dot(x: float, y: float) -> str:
        return f"{_LEFT + at(x):.1f},{_TOP + _EDGE - at(y):.1f}"

    def text(x: float, y: float, words: str, style: str = "") -> str:
        return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(words)}</text>'

    below, above = 1 - share, 1 + share  # the band around the diagonal, clipped to the square
    band = [dot(low, low), dot(low / below, low), dot(high, high * below)]
    band += [dot(high, high), dot(high / above, high), dot(low, low * above)]
    out = [
        text(_LEFT, 16, title, 'font-weight="bold"'),
        text(_LEFT, 32, _ORIGIN),
        f'<rect x="{_LEFT}" y="{_TOP}" width="{_EDGE}" height="{_EDGE}" fill="none" stroke="#333"/>',
        f'<polygon points="{" ".join(band)}" fill="#eaeaea"/>',
        f'<polyline points="{dot(low, low)} {dot(high, high)}" stroke="#4d4d4d"/>',
    ]
    for value in _ticks(low, high):
        out.append(text(_LEFT + at(value), _TOP + _EDGE + 14, f"{value:g}", 'text-anchor="middle"'))
        out.append(text(_LEFT - 5, _TOP + _EDGE - at(value) + 4, f"{value:g}", 'text-anchor="end"'))
    out.append(text(_LEFT + _EDGE / 2, _TOP + _EDGE + 30, f"measured, {unit}", 'text-anchor="middle"'))
    turned = f'text-anchor="middle" transform="rotate(-90 14 {_TOP + _EDGE / 2:.0f})"'
    out.append(text(14, _TOP + _EDGE / 2, f"predicted, {unit}", turned))
    for index, (label, pairs) in enumerate(points.items()):
        colour = f'fill="{_COLOURS[index % len(_COLOURS)]}" fill-opacity="0.75"'
        for x, y in pairs:
            cx, cy = dot(x, y).split(",")
            out.append(f'<circle cx="{cx}" cy="{cy}" r="3" {colour}/>')
        out.append(text(_LEFT + 8, _TOP + 16 + 13 * index, f"\u25cf {label}", colour))
    return "\n".join(out)


def _ticks(low: float, high: float) -> list[float]:
    """Round values within the range: decades, with halves and fifths where there are few."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9)):
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) >= 3:
            break
    return ticks


def _document(panels: Sequence[str]) -> str:
    width, height = (_SIZE + 20) * len(panels), _SIZE + 30
    shifted = [
        f'<g transform="translate({(_SIZE + 20) * i} 0)">\n{panel}\n</g>' for i, panel in enumerate(panels)
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">\n'
        f'<rect width="{width}" height="{height}" fill="white"/>\n' + "\n".join(shifted) + "\n</svg>\n"
    )
