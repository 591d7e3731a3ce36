"""What a model's programs say about the device's arithmetic, for the matched reference of the gates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from llms.llama_kernel_builder.block import Block, Step
from llms.llama_kernel_builder.exceptions import ProgramError
from llms.llama_kernel_builder.llama_loop import KernelSequence
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.llama_kernel_builder.specs import KernelSpec
from llms.verify.reference.arithmetic import (
    AttentionArithmetic,
    DeviceArithmetic,
    LinearArithmetic,
    PhaseArithmetic,
)
from llms.verify.reference.arithmetic.description import Rounding

# Weight argument of a block (names of the mlir-air LLM examples) -> projection
_PROJECTIONS = {
    "wq": "q_proj",
    "wk": "k_proj",
    "wv": "v_proj",
    "wo": "o_proj",
    "w_gate": "gate_proj",
    "w_up": "up_proj",
    "w_down": "down_proj",
}
_BIASES = ("bq", "bk", "bv", "bo")
_NORMS = {"norm_w": "input_norm", "ffn_norm_w": "post_norm"}
# Length along K of one pass of the cascade GEMV (mlir-air e972f2942, bf16_cascade).
CASCADE_STEP = 512


def describe_arithmetic(
    sequence: KernelSequence, config: ModelConfig, bucket: int, *, npu_attn: bool = True
) -> DeviceArithmetic:
    """Read methods, roundings and attention stages of one prompt bucket and of decode from their blocks.

    A GEMM in the low-precision tier is described as `drain`: that tier is a fault unless somebody asks
    for it, so the reference must not follow it. Raises ProgramError for a weight that no block uses.
    """
    prefill = _phase(sequence.prefill_blocks(config, bucket), config)
    if not npu_attn:
        prefill = replace(prefill, attention=AttentionArithmetic("host"))
    head = next(step.spec for step in sequence.lm_head(config).steps)
    return DeviceArithmetic(
        prefill=prefill,
        decode=_phase(sequence.decode_blocks(config), config),
        lm_head=_linear(head),
        pad_token=config.pad_token,
    )


def _phase(blocks: Iterable[Block], config: ModelConfig) -> PhaseArithmetic:
    linears: dict[str, LinearArithmetic] = {}
    roundings: dict[str, Rounding] = {}
    widths: dict[str, int] = {}
    attention = AttentionArithmetic("host")
    for step in (step for block in blocks for step in block.steps):
        op, operands = step.spec.op, step.names
        if op in ("gemm", "gemv", "gemv_add"):
            name = _projection(step)
            linears[name] = _add_slice(linears.get(name), _linear(step.spec), step)
            if op == "gemv_add":
                roundings["attn_add" if name == "o_proj" else "mlp_add"] = "nearest_even"
        elif op == "norm_gateup_swiglu":
            linears["gate_proj"] = linears["up_proj"] = LinearArithmetic("gemv")
            roundings["post_norm"] = roundings["activation"] = _rounding(step.spec)
        elif op == "rms_norm":
            role = _NORMS.get(operands["w"], "qk_norm")
            roundings[role] = _rounding(step.spec)
            if step.spec.dim("N") != (config.head_dim if role == "qk_norm" else config.emb_dim):
                widths[role] = step.spec.dim("N")
        elif op == "rope":
            roundings["rope"] = _rounding(step.spec)
        elif op == "bias_add":
            roundings["bias"] = _rounding(step.spec)
        elif op == "silu_mul":
            roundings["activation"] = _rounding(step.spec)
        elif op == "eltwise_add" and operands["b"] in _BIASES:
            roundings["bias"] = _rounding(step.spec)
        elif op == "eltwise_add" and operands["b"].startswith("down"):
            linears["down_proj"] = replace(linears["down_proj"], joined=_rounding(step.spec))
        elif op == "eltwise_add":
            roundings["mlp_add" if "down_proj" in linears else "attn_add"] = _rounding(step.spec)
        elif op == "flash_attention":
            attention = _flash(step.spec)
    missing = sorted(set(_PROJECTIONS.values()) - set(linears))
    if missing:
        raise ProgramError(f"no block computes {', '.join(missing)}: its arithmetic cannot be described")
    return PhaseArithmetic(linears, attention, roundings, widths)


def _projection(step: Step) -> str:
    weight = step.names["b" if step.spec.op == "gemm" else "w"]
    try:
        return _PROJECTIONS[weight.rstrip("0123456789")]
    except KeyError:
        raise ProgramError(
            f"launch '{step.label}' multiplies by '{weight}', which is no weight of a layer; "
            f"known: {', '.join(_PROJECTIONS)}"
        ) from None


def _add_slice(before: LinearArithmetic | None, new: LinearArithmetic, step: Step) -> LinearArithmetic:
    """A weight in numbered parts (`w_down0`, `w_down1`) is one projection in slices of K."""
    if not step.names["b" if step.spec.op == "gemm" else "w"][-1].isdigit():
        return new
    return replace(new, slices=(*(before.slices if before is not None else ()), step.spec.dim("K")))


def _linear(spec: KernelSpec) -> LinearArithmetic:
    if spec.op == "gemv":
        return LinearArithmetic("gemv")
    if spec.op == "gemv_add":
        return LinearArithmetic("cascade", CASCADE_STEP)
    return LinearArithmetic("fused-cast" if spec.method == "fused-cast" else "drain")


def _flash(spec: KernelSpec) -> AttentionArithmetic:
    tile, attrs = dict(spec.tile), dict(spec.attrs)
    chunk = tile.get("lkp", 64)
    return AttentionArithmetic(
        "flash",
        length=spec.dim("lk"),
        stages=int(attrs.get("num_cascade_stages", 4)),
        chunk=chunk,
        depth=min(chunk, spec.dim("head_dim")),
    )


def _rounding(spec: KernelSpec) -> Rounding:
    if spec.rounding == "nearest_even":
        return "nearest_even"
    return "floor"
