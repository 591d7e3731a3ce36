"""What a bisect found: its verdict, as text for a terminal and as the payload of a record.

Payload (`npu_record("bisect", ...)`): {"model", "device", "checkpoint", "prompt", "n_prompt", "steps",
"comparisons", "bad", "offender": Row or null, "also": [Row], "rows": [Row of every bad comparison, and the
worst good one of every kernel], "confirmed": {"kernel", "before", "after", "healed", "note"} or null,
"layers": {"prefill": [cosine per layer], "decode": [..]}, "verdict": text}; Row as
:class:`llms.verify.localise.judge.Row`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llms.verify.localise.judge import LOOP, Row
from llms.verify.localise.swap import Confirmation


@dataclass(frozen=True)
class BisectReport:
    """What was found. `offender` is None when every comparison was good."""

    model: str
    device: str
    checkpoint: str
    prompt: str
    n_prompt: int
    steps: int
    rows: tuple[Row, ...]
    confirmed: Confirmation | None
    layers: dict[str, list[float]]

    @property
    def bad(self) -> tuple[Row, ...]:
        """All bad comparisons in the order of execution."""
        return tuple(row for row in self.rows if not row.ok)

    @property
    def offender(self) -> Row | None:
        """The first bad comparison."""
        return self.bad[0] if self.bad else None

    @property
    def verdict(self) -> str:
        """One sentence."""
        first = self.offender
        if first is None:
            if self.confirmed is not None:
                return self.confirmed.note
            return f"no kernel, host operation or buffer stands out in {len(self.rows)} comparisons"
        if first.kernel in LOOP:
            good = len(self.rows) - len(self.bad)
            return (
                f"all kernels agree with their references in {good} comparisons; the difference is in the "
                f"host's loop: {first.kernel} ({first.where}): {first.note}"
            )
        same = [row for row in self.bad if (row.path, row.kernel) == (first.path, first.kernel)]
        layers = sorted({row.layer for row in same})
        spread = f", in {len(layers)} layers" if len(layers) > 1 else ""
        return f"first offender: {first.kernel} ({first.where}{spread}): {first.note}"

    def payload(self) -> dict[str, Any]:
        """See the module."""
        shown = [*self.bad[:200], *self._worst_good()]
        return {
            **vars(self),
            "comparisons": len(self.rows),
            "bad": len(self.bad),
            "offender": self.offender.as_dict() if self.offender else None,
            "also": [row.as_dict() for row in self._other_kernels()],
            "rows": [row.as_dict() for row in shown],
            "confirmed": vars(self.confirmed) if self.confirmed else None,
            "verdict": self.verdict,
        }

    def _other_kernels(self) -> list[Row]:
        """First bad row of every other kernel."""
        firsts: dict[tuple[str, str], Row] = {}
        for row in self.bad:
            firsts.setdefault((row.path, row.kernel), row)
        return list(firsts.values())[1:]

    def _worst_good(self) -> list[Row]:
        worst: dict[tuple[str, str, str], Row] = {}
        for row in self.rows:
            key = (row.path, row.kernel, row.result)
            if row.ok and row.kind == "kernel" and (key not in worst or row.cosine < worst[key].cosine):
                worst[key] = row
        return list(worst.values())

    def text(self) -> str:
        """Verdict, table of cosines, confirmation, for a terminal."""
        lines = [
            f"bisect {self.model} on {self.device}, {self.checkpoint}",
            f"prompt of {self.n_prompt} tokens, {self.steps} decode steps, {len(self.rows)} comparisons, "
            f"{len(self.bad)} bad",
            "",
            self.verdict,
        ]
        if self.confirmed is not None:
            lines.append(f"  {self.confirmed.note}")
        lines += ["", _HEAD]
        first = self.offender
        if first is None or first.kernel in LOOP:
            rows = self._worst_good()
        else:
            rows = [
                row
                for row in self.rows
                if (row.kind == "kernel" or not row.ok)
                and (row.path, row.layer) == (first.path, first.layer)
                and row.step <= max(0, first.step)
            ]
        lines += [_line(row, row is first) for row in rows[:60]]
        if first is not None and self.steps and not any(row.path == "decode" for row in self.rows):
            lines += ["", "decode was not compared behind a wrong prefill; compare it by --path decode"]
        others = self._other_kernels()
        if others:
            lines += ["", "also bad, perhaps by the same cause:"]
            lines += [f"  {row.kernel} ({row.where}): {row.note}" for row in others[:8]]
        for path, cosines in self.layers.items():
            lines += ["", f"{path}: median cosine per layer against HF bf16"]
            lines.append("  " + " ".join(f"{value:.4f}" for value in cosines))
        return "\n".join(lines)


_HEAD = f"  {'path':8} {'layer':>5} {'kernel':34} {'result':12} {'cosine':>9} {'error':>9} {'expected':>9}"


def _line(row: Row, marked: bool) -> str:
    mark = "->" if marked else ("x " if not row.ok else "  ")
    return (
        f"{mark}{row.path:8} {row.layer:5} {row.kernel:34} {row.result:12} {row.cosine:9.6f} "
        f"{row.error:9.2e} {row.expected:9.2e}"
    )
