"""`npu-deploy new`: from a checkpoint to a folder that `npu-deploy run` takes to the last phase."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llms.llama_kernel_builder.deployment import describe
from npu_deploy import checks, scaffold


@dataclass(frozen=True)
class NewModel:
    """The answer of `new`: what was made and what to expect of it."""

    name: str
    folder: Path
    result: dict[str, Any]

    def text(self) -> str:
        """The same for people."""
        made = self.result
        lines = [f"{self.name}: {made['folder']}", f"checkpoint  {made['checkpoint']}"]
        lines += [f"note        {note}" for note in made["notes"]]
        lines += [
            f"kernels     {made['rows']['required']} (kernel, shape) pairs, {made['rows']['added']} rows "
            f"added to {made['rows']['registry']}, provenance twin"
        ]
        lines += [f"deviation   {line}" for line in made["deviations"]] or ["deviation   none"]
        lines += [f"share       {made['share_text']}", f"expected    {made['speed_text']}"]
        lines += ["", f"Next: npu-deploy run {self.name}"]
        return "\n".join(lines)


def new_model(
    source: str,
    *,
    name: str | None = None,
    target: str = "npu2",
    dtype: str = "bf16",
    into: Path | None = None,
) -> NewModel:
    """Check everything, then make the folder. Raises DeployError; nothing is left behind then."""
    begin = time.monotonic()
    checks.check_request(target, dtype)
    named = scaffold.model_name(source, name)
    folder = scaffold.place(named, into)
    candidate = checks.examine(source)
    made = scaffold.make(candidate, named, folder, source)
    part, expected = describe.share(candidate.config), describe.speed(candidate.config)
    result = {
        "name": named,
        "folder": str(folder),
        "checkpoint": f"{candidate.checkpoint.path} ({candidate.checkpoint.label})",
        "content_hash": candidate.checkpoint.content_hash,
        "target": target,
        "dtype": dtype,
        "config": candidate.config.as_dict(),
        "notes": list(candidate.notes),
        "rows": {
            "required": made.rows.required,
            "added": made.rows.added,
            "registry": str(scaffold.registry_of(folder)),
        },
        "deviations": list(made.deviations),
        "share": part.as_dict(),
        "share_text": str(part),
        "predicted": {
            "device": "twin (modelled)",
            "seq_len": expected.seq_len,
            "ttft_ms": expected.ttft_ms,
            "tpot_ms": expected.tpot_ms,
            "tps": expected.tps,
            "expected_error": {"ttft": expected.ttft_error, "tpot": expected.tpot_error},
        },
        "speed_text": str(expected),
        "seconds": round(time.monotonic() - begin, 2),
    }
    return NewModel(named, folder, result)
