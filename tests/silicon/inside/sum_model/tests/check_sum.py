"""`pytest --npu` in the sandbox: device, lock, kernel run, numeric comparison, report."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import bench

pytestmark = pytest.mark.phase1


@pytest.mark.parametrize("flow", ["ELF", "XCLBIN"])
def test_sum(flow, npu_device, npu_lock, npu_record, tmp_path):
    """The kernel's whole output against numpy in float32."""
    assert (npu_device.name, npu_device.label) == ("npu2", "npu2 (measured)")
    with npu_lock:
        cache = bench.cache(tmp_path, "add", entry=getattr(bench, flow))
        try:
            out = cache.load_and_run("add", bench.vector(1), bench.vector(2), None)[2].astype(np.float32)
        finally:
            cache.close()
    npu_record("kernel", {"flow": flow, "max_abs": float(np.abs(out - 3).max())})
    wrong = int((np.abs(out - 3) > 0.01).sum())
    assert wrong == 0, f"{wrong} of {out.size} elements wrong: {out[:4]} instead of 3"


def test_the_run_goes_on():
    """Something that passes whatever the device does."""
