"""Which arithmetic a deployment uses: what its runner offers to the gates, as deployed.

Only what may rightly differ between two correct deployments is described: where a sum is rounded, how keys
are shared out, the length a prompt is padded to. What a model *is* (epsilon of a norm, rotary base, masks,
order of layers, the sum of squares of a norm in f32) is never taken from the deployment: there the reference
has its own opinion, so that a fault in it shows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Protocol, get_args, runtime_checkable

Rounding = Literal["floor", "nearest_even", "host"]
LinearMethod = Literal["drain", "fused-cast", "direct", "gemv", "cascade", "host"]
Role = Literal["input_norm", "post_norm", "qk_norm", "rope", "bias", "attn_add", "mlp_add", "activation"]

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ROLES: tuple[Role, ...] = get_args(Role)


class DescriptionError(ValueError):
    """A description of the device's arithmetic that contradicts itself; the text names the field."""


@dataclass(frozen=True)
class LinearArithmetic:
    """How one projection is computed.

    * ``drain``: block floating point product, f32 sum over all of K, one cast to nearest even;
    * ``fused-cast``: the same product left in f32, cast by a second launch, which rounds down;
    * ``direct``: the running sum rounded to bf16 after every ``step`` along K (low precision);
    * ``gemv``: bf16 operands, f32 sum, one cast to nearest even;
    * ``cascade``: as ``gemv``, the running output rounded after every ``step`` along K;
    * ``host``: f32 on the host, one cast.

    ``slices``: widths of the parts along K that a ``gemv`` is shared out over, when none holds all of it.
    Each part gives a bf16 result of its own; they are added in order, each sum rounded as ``joined``.
    """

    method: LinearMethod
    step: int = 0
    slices: tuple[int, ...] = ()
    joined: Rounding = "floor"

    def __post_init__(self) -> None:
        if self.method not in get_args(LinearMethod):
            raise DescriptionError(
                f"linear method {self.method!r} is none of {', '.join(get_args(LinearMethod))}"
            )
        if (self.method in ("direct", "cascade")) != (self.step > 0):
            raise DescriptionError(
                f"method {self.method} with step {self.step}: only direct and cascade step"
            )

        if self.slices and (self.method != "gemv" or min(self.slices) < 1):
            raise DescriptionError(f"method {self.method} with slices {self.slices}: only gemv has slices")

    @property
    def blocked(self) -> bool:
        """Whether the operands are block quantised."""
        return self.method in ("drain", "fused-cast", "direct")


@dataclass(frozen=True)
class AttentionArithmetic:
    """Attention of one phase: ``flash`` on the device, or ``host`` (f32, one cast).

    ``length``: keys that the kernel is compiled for (the bucket); they are shared out evenly over ``stages``,
    each walking its share in chunks of ``chunk``. ``depth``: part of head_dim summed before a rounding.
    """

    method: Literal["flash", "host"]
    length: int = 0
    stages: int = 4
    chunk: int = 64
    depth: int = 64

    def __post_init__(self) -> None:
        if self.method not in ("flash", "host"):
            raise DescriptionError(f"attention method {self.method!r} is neither flash nor host")
        if self.method == "flash" and (
            min(self.length, self.stages, self.chunk, self.depth) < 1
            or self.length % (self.stages * self.chunk)
            or self.chunk % 8
            or self.depth % 8
        ):
            raise DescriptionError(
                f"{self.length} keys are not shared out evenly over {self.stages} stages in chunks of "
                f"{self.chunk} (depth {self.depth})"
            )


@dataclass(frozen=True)
class PhaseArithmetic:
    """Arithmetic of prefill or of decode.

    ``linears``: a :class:`LinearArithmetic` per projection, by Hugging Face's name (``q_proj`` ..
    ``down_proj``). ``roundings``: rounding of the element-wise launches by role; a role that is not named
    runs on the host (f32, one cast, exact functions). ``norm_widths``: by role of a norm, the length that its
    rows are padded to with zeros; a role that is not named has the model's own.
    """

    linears: Mapping[str, LinearArithmetic]
    attention: AttentionArithmetic
    roundings: Mapping[str, Rounding] = field(default_factory=dict)
    norm_widths: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = [name for name in LINEARS if name not in self.linears]
        if missing:
            raise DescriptionError(f"no arithmetic is given for {', '.join(missing)}")
        unknown = sorted(set(self.linears) - set(LINEARS)) + sorted(
            {*self.roundings, *self.norm_widths} - set(ROLES)
        )
        if unknown:
            raise DescriptionError(f"unknown entries: {', '.join(unknown)}")
        bad = sorted({value for value in self.roundings.values() if value not in get_args(Rounding)})
        if bad:
            raise DescriptionError(f"unknown rounding {', '.join(bad)}")

    def rounding(self, role: Role) -> Rounding:
        """Return the rounding of a role."""
        return self.roundings.get(role, "host")

    def as_dict(self) -> dict[str, Any]:
        """Return the description as JSON-able values."""
        return {
            "linears": {name: asdict(self.linears[name]) for name in sorted(self.linears)},
            "attention": asdict(self.attention),
            "roundings": {name: self.roundings[name] for name in sorted(self.roundings)},
            **({"norm_widths": dict(sorted(self.norm_widths.items()))} if self.norm_widths else {}),
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> PhaseArithmetic:
        """Return the description that :meth:`as_dict` was made from."""
        return cls(
            {name: _linear(linear) for name, linear in content["linears"].items()},
            AttentionArithmetic(**content["attention"]),
            content["roundings"],
            content.get("norm_widths", {}),
        )


def _linear(content: Mapping[str, Any]) -> LinearArithmetic:
    return LinearArithmetic(**{**content, "slices": tuple(content["slices"])})


@dataclass(frozen=True)
class DeviceArithmetic:
    """Arithmetic of a deployment for prompts of one compiled length.

    Attributes:
        prefill, decode: the two phases. The final norm runs on the host, the LM head as ``lm_head``.
        lm_head: arithmetic of the LM head (one row).
        pad_token: what fills a prompt up to its compiled length. Padding rows reach real positions in one
            way only: values of up to seven of them share block exponents with the last real ones.
    """

    prefill: PhaseArithmetic
    decode: PhaseArithmetic
    lm_head: LinearArithmetic
    pad_token: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the description as JSON-able values, part of the key of a cached run."""
        return {
            "prefill": self.prefill.as_dict(),
            "decode": self.decode.as_dict(),
            "lm_head": asdict(self.lm_head),
            "pad_token": self.pad_token,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> DeviceArithmetic:
        """Return the description that :meth:`as_dict` was made from, for a runner in another process.

        Raises:
            DescriptionError: it contradicts itself.
        """
        return cls(
            PhaseArithmetic.from_dict(content["prefill"]),
            PhaseArithmetic.from_dict(content["decode"]),
            _linear(content["lm_head"]),
            content["pad_token"],
        )


@runtime_checkable
class DescribedRunner(Protocol):
    """Optional ability of a runner: it says which arithmetic is deployed."""

    def device_arithmetic(self, prompt_len: int) -> DeviceArithmetic:
        """Return the arithmetic that a prompt of ``prompt_len`` tokens and its decode steps meet."""


PUBLISHED_FLOOR: Mapping[str, Rounding] = dict.fromkeys(ROLES, "floor")
"""Element-wise launches as published: float-only cores round toward minus infinity."""
