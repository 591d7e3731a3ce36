"""What a sweep is asked for: a kernel, a shape and the variant, from the command line or a model's config.

Which kernels a model launches is known to who builds its programs: a package that offers the entry point
`cases` of the group `npu_kernel_bench`, a function of a config.json's content and the prefill lengths.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kernel_registry.registry_lookup import DIMS, GEMM_METHODS
from npu_twin.extensions import ExtensionMissing, extension

BENCHES = "npu_kernel_bench"
"""Entry-point group of those who know a model's kernels and run kernels on silicon."""
DEFAULT_BUCKETS = (128, 256, 512, 1024, 2048)


class RequestError(ValueError):
    """A shape or a shapes file cannot be understood. The message says what was expected."""


@dataclass(frozen=True)
class Request:
    """One kernel at one shape. ``precision`` and ``output_dtype`` concern GEMM, ``causal`` attention;
    ``method`` restricts the implementation, empty for any of the tier.
    """

    op: str
    shape: tuple[int, ...]
    precision: str = "high"
    output_dtype: str = "bf16"
    causal: bool = False
    method: str = ""

    @property
    def dims(self) -> dict[str, int]:
        """Dimensions by name."""
        return dict(zip(DIMS[self.op], self.shape, strict=True))

    @property
    def tier(self) -> str:
        """Tier name of the legal-tile search: ``high``, ``low`` or ``f32``."""
        return "f32" if self.output_dtype == "f32" else self.precision

    def __str__(self) -> str:
        text = f"{self.op} {'x'.join(map(str, self.shape))}"
        if self.op == "gemm":
            text += f" {self.output_dtype} {self.precision}"
        return text + (" causal" if self.causal else "") + (f" {self.method}" if self.method else "")


def parse(op: str, shape: str, **variant: Any) -> Request:
    """Read a shape such as ``256x576x1536``; ``variant`` are further fields of the request.

    Raises RequestError naming the dimensions of the kernel.
    """
    if op not in DIMS:
        raise RequestError(f"unknown kernel {op!r}; known: {', '.join(DIMS)}")
    names = DIMS[op]
    try:
        sizes = tuple(int(part) for part in str(shape).lower().split("x"))
    except ValueError:
        sizes = ()
    if len(sizes) != len(names) or any(s < 1 for s in sizes):
        raise RequestError(f"{op}: shape {shape!r} must be {'x'.join(names)}, positive integers")
    request = Request(op, sizes, **variant)
    if op == "gemm" and (request.output_dtype, request.precision) not in GEMM_METHODS:
        raise RequestError(
            f"gemm: no kernel writes {request.output_dtype} with precision {request.precision!r}"
        )
    return request


def from_file(path: Path, buckets: Sequence[int] = DEFAULT_BUCKETS) -> tuple[list[Request], list[str]]:
    """Requests and ``used_by`` tags of a JSON file.

    The file is a Hugging Face ``config.json`` of the Llama family, or
    ``{"used_by": [...], "shapes": [{"op": "gemm", "shape": "256x576x576", "precision": "high"}, ...]}``.
    Raises RequestError.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RequestError(f"{path}: {error}") from None
    if isinstance(data, Mapping) and "hidden_size" in data:
        return from_config(data, buckets), []
    if not isinstance(data, Mapping) or not isinstance(data.get("shapes"), list):
        raise RequestError(f"{path}: neither a model's config.json nor an object with a list 'shapes'")
    requests = []
    for i, item in enumerate(data["shapes"]):
        try:
            requests.append(parse(**item))
        except TypeError as error:
            raise RequestError(f"{path}: shapes[{i}]: needs op and shape ({error})") from None
    return list(dict.fromkeys(requests)), [str(tag) for tag in data.get("used_by", [])]


def from_config(config: Mapping[str, Any], buckets: Sequence[int] = DEFAULT_BUCKETS) -> list[Request]:
    """Every (kernel, shape) that a model launches, for prefill buckets and decode.

    Raises RequestError naming what the configuration lacks, or who would know.
    """
    try:
        requests: list[Request] = extension(BENCHES, "cases")(config, buckets)
    except ExtensionMissing as error:
        raise RequestError(f"the kernels of a model: {error}") from None
    return requests
