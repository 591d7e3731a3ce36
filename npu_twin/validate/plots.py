"""Plots of predicted against measured times. matplotlib is needed only here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from npu_twin.validate.latency import KernelResult, ModelsResult

_ORIGIN = "twin (modelled) against measurements"


def write(
    folder: Path, kernels: Sequence[KernelResult], models: ModelsResult, suffix: str = ".svg"
) -> list[Path]:
    """Write one plot per judged kernel and one for the models; return the files, none without matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return []
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    files = []
    for kernel in kernels:
        if kernel.judged and kernel.results:
            figure, axis = plt.subplots(figsize=(5.5, 5))
            _kernel(axis, kernel)
            files.append(_save(plt, figure, folder / f"latency_{kernel.name}{suffix}"))
    if models.results:
        figure, axes = plt.subplots(1, 2, figsize=(9, 4.2))
        _models(axes, models)
        files.append(_save(plt, figure, folder / f"models{suffix}"))
    return files


def _save(plt: Any, figure: Any, path: Path) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=90, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})
    plt.close(figure)
    return path


def _band(axis: Any, low: float, high: float, share: float) -> None:
    axis.plot([low, high], [low, high], color="0.3", linewidth=1)
    axis.fill_between(
        [low, high],
        [low * (1 - share), high * (1 - share)],
        [low * (1 + share), high * (1 + share)],
        color="0.92",
    )


def _kernel(axis: Any, kernel: KernelResult) -> None:
    groups: dict[str, list[tuple[float, float]]] = {}
    for result in kernel.results:
        label = result.row.kernel if result.row.kernel != kernel.name else result.row.call.method or "all"
        label = f"{label}, {result.row.scope}" if result.row.scope != "alone" else label
        if result.excepted:
            label = "table entry, not judged"
        groups.setdefault(label, []).append((result.row.measured_us, result.predicted_us))
    values = [value for pairs in groups.values() for pair in pairs for value in pair]
    _band(axis, min(values) * 0.8, max(values) * 1.25, 0.10)
    for label, pairs in sorted(groups.items()):
        axis.scatter([x for x, _ in pairs], [y for _, y in pairs], s=16, alpha=0.75, label=label)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("measured, us")
    axis.set_ylabel("predicted, us")
    axis.set_title(
        f"{kernel.name}: median {kernel.quantile(0.5):.1%}, p90 {kernel.quantile(0.9):.1%}\n{_ORIGIN}",
        fontsize=9,
    )
    axis.legend(fontsize=7)


def _models(axes: Any, models: ModelsResult) -> None:
    titles = {"ttft_s": "time to first token, s", "decode_ms_per_token": "time per output token, ms"}
    for axis, (quantity, title) in zip(axes, titles.items(), strict=True):
        points = [
            (r.record.id, *r.figures()[quantity][:2]) for r in models.results if quantity in r.figures()
        ]
        if not points:
            continue
        values = [v for _, predicted, published in points for v in (predicted, published)]
        _band(axis, min(values) * 0.8, max(values) * 1.2, 0.12)
        for name, predicted, published in points:
            axis.scatter(published, predicted, s=22)
            axis.annotate(
                name, (published, predicted), fontsize=7, xytext=(4, -8), textcoords="offset points"
            )
        axis.set_xlabel(f"published {title}")
        axis.set_ylabel(f"predicted {title}")
    axes[0].set_title(_ORIGIN, fontsize=9)
