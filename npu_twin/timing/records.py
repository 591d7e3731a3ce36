"""The launch that a measurement record describes: operation, sizes, tile, herd, and where it ran."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from npu_twin.opset import Config
from npu_twin.timing import tiling

ALONE = "alone"
"""A kernel measured on its own, as one configuration of the array."""
IN_PROGRAM = "in program"
"""One launch of a program of several."""
OWN_PROGRAM = "own program"
"""A program of one launch, called between other programs."""
ONE_LAUNCH = "one launch"
"""A program of one launch, called again and again: the launch is loaded each time."""

OPS = {
    "gemm": "gemm",
    "gemv": "gemv",
    "rmsnorm": "rms_norm",
    "rms_norm": "rms_norm",
    "layernorm": "layer_norm",
    "layer_norm": "layer_norm",
    "rope": "rope",
    "flash_attention": "flash_attention",
    "eltwise_add": "eltwise_add",
    "bias_add": "bias_add",
    "silu_mul": "silu_mul",
    "gelu": "gelu",
    "qk_norm": "rms_norm",
    "weighted_rms_norm": "rms_norm",
    "add": "eltwise_add",
    "swiglu": "silu_mul",
    "flash_attn": "flash_attention",
}
"""Operation by the names that records give a kernel."""
BOTH_FORMATS = "elf_vs_xclbin_same_driver"
_GEMM_METHODS = frozenset({"drain", "fused-cast", "direct", "external"})
_SIZES = (
    *("M", "K", "N", "rows", "head_dim", "n_elements", "lq", "lk", "dk", "dv", "q_heads", "kv_heads"),
    *("tile", "tile_m", "tile_k_l2", "tile_k_l1", "tile_n", "m_input", "herd_x", "herd_y", "tiles_used"),
    *("lqp", "lkp", "num_q_tiles", "heads_per_unroll", "num_cascade_stages", "dv_chunks"),
)
_LARGEST_SIZE = 1 << 31


def text(record: Mapping[str, Any], name: str, default: str) -> str:
    """Return a field as text, `default` where it is missing or null."""
    value = record.get(name)
    return default if value is None else str(value)


def check_sizes(record: Mapping[str, Any]) -> None:
    """Raise ValueError naming the first size of a record that is no positive whole number."""
    for name in _SIZES:
        value = record.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _LARGEST_SIZE:
            raise ValueError(f"{name} must be a positive whole number, not {value!r}")
    if text(record, "dtype_out", "bf16") not in ("bf16", "f32"):
        raise ValueError(f"dtype_out must be bf16 or f32, not {record['dtype_out']!r}")


def scope_of(record: Mapping[str, Any]) -> str:
    """Return where the launch of a record ran: one of the scopes above."""
    section = str(record.get("section", ""))
    if section == BOTH_FORMATS:
        elf = record.get("output_format") == "elf" or "format elf" in str(record.get("note", ""))
        return ONE_LAUNCH if elf else ALONE
    if section != "in_situ_fused_elf":
        return ALONE
    own = record.get("own_program") or "one launch" in str(record.get("note", ""))
    own = own or record.get("kernel") == "flash_attention"
    return OWN_PROGRAM if own else IN_PROGRAM


def _herd(record: Mapping[str, Any], default: tuple[int, int]) -> tuple[int, int]:
    x, y = record.get("herd_x"), record.get("herd_y")
    return (int(x), int(y or 1)) if x else default


def launch_of(record: Mapping[str, Any]) -> tuple[Config, bool]:
    """Return the launch that a record measured, and whether the rules had to choose its tile.

    Raises KeyError, TypeError or ValueError for an incomplete record.
    """
    check_sizes(record)
    return _call(OPS[str(record.get("kernel", ""))], record)


def _call(kernel: str, record: Mapping[str, Any]) -> tuple[Config, bool]:
    method = str(record.get("method") or "")
    if kernel == "gemm":
        return _gemm(method, record)
    if kernel == "gemv":
        m, k = int(record["M"]), int(record["K"])
        guess = tiling.gemv(m, k)
        if record.get("tile_m") is None:
            return guess, True
        tile = {"tile_m": int(record["tile_m"]), "m_input": int(record.get("m_input") or record["tile_m"])}
        return Config("gemv", method or "external", {"M": m, "K": k}, tile, _herd(record, (8, 1))), False
    if kernel in ("rms_norm", "layer_norm"):
        m, n = _size(record, "M", "rows"), _size(record, "N", "head_dim")
        herd = _herd(record, tiling.rows_herd(m))
        return Config(kernel, method, {"M": m, "N": n}, {}, herd), False
    if kernel == "rope":
        rows, head_dim = int(record["rows"]), int(record["head_dim"])
        herd = _herd(record, tiling.rows_herd(rows))
        return Config(kernel, method, {"rows": rows, "head_dim": head_dim}, {}, herd), False
    if kernel == "flash_attention":
        return _attention(record)
    if kernel == "bias_add":
        rows = _size(record, "rows", "M")
        dims = {"rows": rows, "n": int(record.get("N") or record["n_elements"] // rows)}
        return Config(kernel, method, dims, {}, _herd(record, (8, 1))), False
    width = record.get("tile_n") or record.get("tile")
    herd = _herd(record, (8, 2) if kernel == "gelu" else (8, 1))
    tile = {"tile_n" if kernel != "eltwise_add" else "tile": int(width)} if width else {}
    return Config(kernel, method, {"n": elements(record)}, tile, herd), not width


def _size(record: Mapping[str, Any], *names: str) -> int:
    """Return the first of some sizes that a record has. Raises KeyError with the first name without any."""
    found = next((record[name] for name in names if record.get(name) is not None), None)
    if found is None:
        raise KeyError(names[0])
    return int(found)


def elements(record: Mapping[str, Any]) -> int:
    """Return the number of elements of an element-wise record. Raises KeyError without one."""
    if record.get("n_elements") is None and record.get("N") is not None:
        return _size(record, "rows", "M") * int(record["N"])
    return _size(record, "n_elements")


def _gemm(method: str, record: Mapping[str, Any]) -> tuple[Config, bool]:
    """Return the launch of a GEMM record, and whether the rules had to choose a part of its tile.

    The `tile_n` of a record of a launch in a program is not used: in the published sweep four values a
    shape, from 48 to 256, took the same time to half a percent (kernels alone: a third more from 128 to 64),
    so the value of the sweep did not reach the program, which was built with the tile of its rule.
    """
    m, k, n = int(record["M"]), int(record["K"]), int(record["N"])
    if method and method not in _GEMM_METHODS:
        raise ValueError(f"unknown method {method!r}; known: {', '.join(sorted(_GEMM_METHODS))}")
    attrs: dict[str, object] = {"output_dtype": "f32"} if record.get("dtype_out") == "f32" else {}
    given = {key: record.get(key) for key in ("tile_m", "tile_k_l2", "tile_k_l1", "tile_n")}
    if scope_of(record) == IN_PROGRAM:
        given["tile_n"] = None
    herd = _herd(record, (0, 0))
    if all(given.values()) and herd[0]:
        tile = {key: int(str(value)) for key, value in given.items()}
        return Config("gemm", method or "drain", {"M": m, "K": k, "N": n}, tile, herd, attrs), False
    used = int(record.get("tiles_used") or _tiles_in_note(record) or 0)
    wanted = herd if herd[0] else (4, max(1, used // 4)) if used and used < 32 else None
    guess = tiling.gemm(m, k, n, method or "drain", wanted)
    tile = {key: int(str(given[key] or guess.tile[key])) for key in guess.tile}
    shape = guess.herd
    if not herd[0] and n % (tile["tile_n"] * shape[1]):
        shape = (shape[0], next(h for h in (4, 3, 2, 1) if n % (tile["tile_n"] * h) == 0))
    return Config("gemm", guess.method, guess.dims, tile, shape, attrs), True


def _tiles_in_note(record: Mapping[str, Any]) -> int:
    words = str(record.get("note", "")).split()
    return int(words[-1]) if words[:2] == ["tiles", "used"] and words[-1].isdigit() else 0


def _attention(record: Mapping[str, Any]) -> tuple[Config, bool]:
    guess = tiling.attention(
        int(record["lq"]),
        int(record["lk"]),
        int(record.get("dk") or record["head_dim"]),
        int(record["q_heads"]),
        int(record["kv_heads"]),
        bool(record.get("causal")),
    )
    tile = {key: int(record.get(key) or value) for key, value in guess.tile.items()}
    if record.get("dv_chunks"):
        tile["dv_tile"] = int(record.get("dv") or record["dk"]) // int(record["dv_chunks"])
    attrs = dict(guess.attrs)
    for key in ("heads_per_unroll", "num_cascade_stages"):
        attrs[key] = int(record.get(key) or int(str(attrs[key])))
    herd = _herd(record, guess.herd)
    return Config("flash_attention", guess.method, guess.dims, tile, herd, attrs), not record.get("lqp")
