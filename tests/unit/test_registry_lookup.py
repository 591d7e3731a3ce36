"""Lookup: the best row for a shape, or an error that names the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kernel_registry import registry_lookup as lookup
from kernel_registry.schema import row_id

BUCKETS = (128, 256, 512, 1024, 2048)


def gemv_row(latency: float | None, provenance: str, **changes: Any) -> dict[str, Any]:
    row: dict[str, Any] = {
        "op": "gemv",
        "dims": {"M": 4096, "K": 512},
        "method": "external",
        "tile": {"tile_m": 8, "m_input": 8},
        "herd": [8, 1],
        "context": "standalone",
        "status": "pass",
        "provenance": provenance,
        "figures": {} if latency is None else {"latency_us": latency},
        "date": "2026-08",
        "source": "a test",
        **changes,
    }
    return {**row, "id": row_id(row)}


def write(root: Path, rows: list[dict[str, Any]], op: str = "gemv") -> Path:
    folder = root / "details"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{op}.json").write_text(json.dumps({"schema": 1, "op": op, "rows": rows}))
    return root


def test_published_silicon_wins_over_faster_rows_of_lesser_provenance(tmp_path: Path) -> None:
    rows = [
        gemv_row(10.0, "twin", tile={"tile_m": 2, "m_input": 2}),
        gemv_row(20.0, "measured-silicon", tile={"tile_m": 4, "m_input": 4}),
        gemv_row(30.0, "published-silicon"),
    ]
    assert lookup.config("gemv", M=4096, K=512, registry=write(tmp_path, rows)).latency_us == 30.0
    assert lookup.config("gemv", M=4096, K=512, registry=write(tmp_path, rows[:2])).latency_us == 20.0
    found = lookup.config("gemv", M=4096, K=512, registry=write(tmp_path, rows[:1]))
    assert (found.provenance, found.latency_us, found.tile) == ("twin", 10.0, {"tile_m": 2, "m_input": 2})


def test_the_fastest_of_one_provenance_wins_and_an_untimed_row_comes_last(tmp_path: Path) -> None:
    rows = [
        gemv_row(None, "twin", tile={"tile_m": 2, "m_input": 2}),
        gemv_row(12.0, "twin", tile={"tile_m": 4, "m_input": 4}),
        gemv_row(11.0, "twin"),
    ]
    assert lookup.config("gemv", M=4096, K=512, registry=write(tmp_path, rows)).latency_us == 11.0
    only = write(tmp_path, rows[:1])
    assert lookup.config("gemv", M=4096, K=512, registry=only).latency_us is None


@pytest.mark.parametrize(
    "change",
    [
        {"status": "compile_fail", "error": "L1"},
        {"status": "silent_corruption"},
        {"context": "in_situ"},
        {"herd": None},
        {"tile": {"tile_m": 8}},
    ],
)
def test_rows_that_cannot_configure_a_kernel_are_passed_over(tmp_path: Path, change: dict[str, Any]) -> None:
    root = write(tmp_path, [gemv_row(1.0, "published-silicon", **change)])
    with pytest.raises(lookup.UnmeasuredShape):
        lookup.config("gemv", M=4096, K=512, registry=root)


def test_overlay_from_the_environment_adds_to_the_packaged_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(lookup.UnmeasuredShape):
        lookup.config("gemv", M=4096, K=512)
    write(tmp_path, [gemv_row(9.0, "twin")])
    monkeypatch.setenv(lookup.ENV, str(tmp_path))
    assert lookup.config("gemv", M=4096, K=512).latency_us == 9.0
    assert lookup.config("gemv", M=2048, K=2048 * 4).provenance == "published-silicon"


def test_an_overlay_row_replaces_the_packaged_row_of_the_same_id(tmp_path: Path) -> None:
    packaged = lookup.config("gemv", M=8192, K=2048)
    (row,) = [r for r in lookup.rows("gemv", {"M": 8192, "K": 2048}) if r["id"] == packaged.row_id]
    write(tmp_path, [{**row, "figures": {"latency_us": 1.5}}])
    assert lookup.config("gemv", M=8192, K=2048, registry=tmp_path).latency_us == 1.5
    assert lookup.config("gemv", M=8192, K=2048).latency_us == 1067.0


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    write(tmp_path, [gemv_row(9.0, "twin")])
    assert lookup.config("gemv", M=4096, K=512, registry=tmp_path).latency_us == 9.0
    write(tmp_path, [gemv_row(8.25, "twin")])
    assert lookup.config("gemv", M=4096, K=512, registry=tmp_path).latency_us == 8.25


@pytest.mark.parametrize(
    ("call", "command"),
    [
        (lambda: lookup.config("gemm", M=300, K=576, N=576),
         "python -m kernel_registry sweep gemm 300x576x576 --precision high"),
        (lambda: lookup.config("gemm", M=300, K=576, N=576, precision="low"),
         "python -m kernel_registry sweep gemm 300x576x576 --precision low"),
        (lambda: lookup.config("gemm", M=300, K=576, N=576, output_dtype="f32"),
         "python -m kernel_registry sweep gemm 300x576x576 --output-dtype f32"),
        (lambda: lookup.config("gemv", M=7, K=64), "python -m kernel_registry sweep gemv 7x64"),
        (lambda: lookup.config("flash_attention", lq=384, lk=384, head_dim=64, q_heads=9, kv_heads=3),
         "python -m kernel_registry sweep flash_attention 384x384x64x9x3 --causal"),
        (lambda: lookup.config("rms_norm", M=1, N=576, method="weighted_bf16_sum"),
         "python -m kernel_registry sweep rms_norm 1x576 --method weighted_bf16_sum"),
        (lambda: lookup.config("bias_add", rows=5, n=48), "python -m kernel_registry sweep bias_add 5x48"),
        (lambda: lookup.config("silu_mul", n=48), "python -m kernel_registry sweep silu_mul 48"),
    ],
)  # fmt: skip
def test_an_unmeasured_shape_names_the_command_that_adds_it(call: Any, command: str) -> None:
    with pytest.raises(lookup.UnmeasuredShape) as error:
        call()
    assert error.value.command == command
    assert str(error.value).endswith(f"add it with: {command}")


def test_wrong_dimensions_are_named() -> None:
    with pytest.raises(ValueError, match=r"the registry knows dimensions M, K$"):
        lookup.config("gemv", M=4096, N=512)
    with pytest.raises(ValueError, match="the registry knows a kernel, one of gemm, gemv"):
        lookup.config("softmax", n=64)


def test_a_combination_that_no_gemm_offers() -> None:
    with pytest.raises(ValueError, match="no GEMM writes f32 with precision 'low'"):
        lookup.config("gemm", M=2048, K=2048, N=2048, output_dtype="f32", precision="low")


def test_tiers_and_output_types_choose_different_methods() -> None:
    assert lookup.config("gemm", M=2048, K=2048, N=2048).method == "fused-cast"
    assert lookup.config("gemm", M=2048, K=2048, N=2048, precision="low").method == "direct"
    assert lookup.config("gemm", M=2048, K=2048, N=2048, output_dtype="f32").method == "external"
    assert lookup.config("gemm", M=2048, K=1024, N=1024).method == "drain"


def test_causal_and_full_attention_are_different_rows() -> None:
    assert (
        lookup.config(
            "flash_attention", lq=2048, lk=2048, head_dim=64, q_heads=32, kv_heads=8, causal=True
        ).attrs["causal"]
        is True
    )
    assert (
        lookup.config(
            "flash_attention", lq=512, lk=512, head_dim=64, q_heads=2, kv_heads=2, causal=False
        ).attrs["causal"]
        is False
    )
    with pytest.raises(lookup.UnmeasuredShape):
        lookup.config("flash_attention", lq=512, lk=512, head_dim=64, q_heads=2, kv_heads=2, causal=True)


@pytest.mark.parametrize("m", BUCKETS)
def test_the_default_model_has_all_prefill_rows(m: int) -> None:
    found = [
        lookup.config("rms_norm", M=m, N=576),
        *(
            lookup.config("gemm", M=m, K=k, N=n)
            for k, n in ((576, 576), (576, 192), (576, 1536), (1536, 576))
        ),
        lookup.config("rope", rows=m * 9, head_dim=64),
        lookup.config("rope", rows=m * 3, head_dim=64),
        lookup.config("flash_attention", lq=m, lk=m, head_dim=64, q_heads=9, kv_heads=3, causal=True),
        lookup.config("eltwise_add", n=m * 576),
        lookup.config("silu_mul", n=m * 1536),
    ]
    assert all(config.latency_us for config in found)


def test_the_default_model_has_all_decode_rows() -> None:
    lookup.config("rms_norm", M=1, N=576)
    for m, k in ((576, 576), (192, 576), (1536, 576), (576, 1536), (49152, 576)):
        lookup.config("gemv", M=m, K=k)
    for rows in (9, 3):
        lookup.config("rope", rows=rows, head_dim=64)
    lookup.config("eltwise_add", n=576)
    lookup.config("silu_mul", n=1536)


def test_a_configuration_is_the_callers_own_copy() -> None:
    first = lookup.config("gemv", M=8192, K=2048)
    first.tile["tile_m"] = 999
    assert lookup.config("gemv", M=8192, K=2048).tile == {"tile_m": 8, "m_input": 8}
    with pytest.raises(AttributeError):
        first.method = "other"  # type: ignore[misc]


def test_a_broken_file_is_an_error_not_a_missing_shape(tmp_path: Path) -> None:
    (tmp_path / "details").mkdir()
    (tmp_path / "details" / "gemv.json").write_text('{"rows": [{"dims": {"M": 1}}]}')
    with pytest.raises(ValueError, match="not a kernel registry file"):
        lookup.config("gemv", M=1, K=64, registry=tmp_path)


def test_lookup_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from kernel_registry import registry_lookup as r\n"
        "r.config('gemm', M=2048, K=2048, N=2048)\n"
        "heavy = {'torch', 'pydantic', 'npu_twin', 'numpy', 'llms', 'ml_dtypes'} & set(sys.modules)\n"
        "sys.exit(', '.join(sorted(heavy)) or 0)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != lookup.ENV}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
