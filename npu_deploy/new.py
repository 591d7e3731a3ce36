"""`npu-deploy new`: from a checkpoint to a folder that `npu-deploy run` takes to the last phase."""

from __future__ import annotations

import time
from pathlib import Path

from llms.llama_kernel_builder.deployment import describe
from npu_deploy import checks, scaffold
from npu_deploy.answer import Answer


def new_model(
    source: str,
    *,
    name: str | None = None,
    target: str = "npu2",
    dtype: str = "bf16",
    into: Path | None = None,
) -> Answer:
    """Check everything, then make the folder. Raises DeployError; nothing is left behind then."""
    from llms.llama_kernel_builder.device_config import deviations

    begin = time.monotonic()
    checks.check_request(target, dtype)
    named = scaffold.model_name(source, name)
    folder = scaffold.place(named, into)
    candidate = checks.examine(source)
    rows = {**scaffold.make(candidate, named, folder, source), "registry": str(scaffold.registry_of(folder))}
    share, speed = describe.share(candidate.config), describe.speed(candidate.config)
    data = {
        "name": named,
        "folder": str(folder),
        "checkpoint": f"{candidate.checkpoint.path} ({candidate.checkpoint.label})",
        "content_hash": candidate.checkpoint.content_hash,
        "target": target,
        "dtype": dtype,
        "config": candidate.config.as_dict(),
        "notes": list(candidate.notes),
        "rows": rows,
        "deviations": list(deviations(candidate.config)),
        "share": share.as_dict(),
        "share_text": str(share),
        "predicted": speed.as_dict(),
        "speed_text": str(speed),
        "seconds": round(time.monotonic() - begin, 2),
    }
    lines = [f"{named}: {folder}", f"checkpoint  {data['checkpoint']}"]
    lines += [f"note        {note}" for note in candidate.notes]
    lines += [
        f"kernels     {rows['required']} (kernel, shape) pairs, {rows['added']} rows "
        f"added to {rows['registry']}, provenance twin"
    ]
    lines += [f"deviation   {line}" for line in deviations(candidate.config)] or ["deviation   none"]
    lines += [f"share       {share}", f"expected    {speed}", "", f"Next: npu-deploy run {named}"]
    return Answer(data, tuple(lines))
