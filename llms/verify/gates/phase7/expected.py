"""How long a deployment should take: its own programs on the calibrated timing model, its own host traffic.

`npu_twin.timing.predict` knows the published flow, where every result visits the host. A deployment of this
toolkit has other programs, and its activations stay on the device until the host looks at them. Here the
programs that a prefill and a decode step call are taken from the model's blocks, and every buffer is
followed: it is written when a program needs what lies on the host, and read when the host needs what lies on
the device. Nothing is run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from npu_twin import timing

if TYPE_CHECKING:
    from llms.llama_kernel_builder.block import Block
    from llms.llama_kernel_builder.llama_loop import KernelSequence
    from llms.llama_kernel_builder.model_config import ModelConfig

_BF16 = 2


@dataclass(frozen=True)
class ExpectedTime:
    """Milliseconds of one prefill and of one decode step, and how many buffers they move."""

    prefill_ms: float
    decode_ms: float
    prefill_transfers: int
    decode_transfers: int


@dataclass(frozen=True)
class _Launch:
    """A launch in the form that the timing model takes."""

    name: str
    op: str
    method: str
    dims: Mapping[str, int]
    tile: Mapping[str, int]
    herd: tuple[int, int]
    attrs: Mapping[str, object]


@dataclass(frozen=True)
class _Listing:
    launches: Sequence[_Launch]


@dataclass
class _Value:
    """An activation: where it is good. On the device only, until somebody reads it."""

    nbytes: int
    on_host: bool
    on_device: bool


@dataclass
class _Count:
    """Time of one pass, added up while its buffers are followed."""

    us: float = 0.0
    transfers: int = 0
    programs: dict[str, float] = field(default_factory=dict)

    def host(self, name: str, *, nbytes: int = 0, flops: int = 0) -> None:
        """Work of the host."""
        self.us += timing.host_op_us(name, nbytes=nbytes, flops=flops)

    def read(self, value: _Value) -> None:
        """The host looks at a value."""
        if not value.on_host:
            self._move(value.nbytes, to_device=False)
            value.on_host = True

    def run(self, block: Block, values: Mapping[str, _Value]) -> dict[str, _Value]:
        """A program runs on values by the names of its inputs; returns its outputs."""
        packs = block.pack is not None
        if packs:
            for value in values.values():
                self.read(value)
            self.host("head_first_transpose", nbytes=2 * sum(value.nbytes for value in values.values()))
        for buffer in block.buffers:
            if buffer.role == "input" and (packs or not values[buffer.name].on_device):
                self._move(buffer.nbytes, to_device=True)
        if block.name not in self.programs:
            self.programs[block.name] = timing.run_us(_listing(block)).total_us
        self.us += timing.dispatch_us() + timing.context_switch_us() + self.programs[block.name]
        outputs = {b.name: _Value(b.nbytes, False, True) for b in block.buffers if b.role == "output"}
        if packs:
            for value in outputs.values():
                self.read(value)
                value.on_device = False
            self.host("head_first_transpose", nbytes=2 * sum(value.nbytes for value in outputs.values()))
        return outputs

    def _move(self, nbytes: int, *, to_device: bool) -> None:
        self.us += timing.sync_us(nbytes, to_device)
        self.transfers += 1


def _listing(block: Block) -> _Listing:
    return _Listing(
        tuple(
            _Launch(
                step.label,
                step.spec.op,
                step.spec.method,
                dict(step.spec.dims),
                dict(step.spec.tile),
                step.spec.herd,
                dict(step.spec.attrs),
            )
            for step in block.steps
        )
    )


def expected_time(
    sequence: KernelSequence, config: ModelConfig, rows: int, tokens: int, *, recorded: bool = True
) -> ExpectedTime:
    """Time of a prefill of `tokens` in `rows` compiled rows, and of the decode step behind it.

    recorded: the host also looks at the output of every layer of the prefill, and norms that of the last one
    token by token, as the runner of the gates does.
    """
    prefill, decode = _Count(), _Count()
    _prefill(prefill, sequence, config, rows, tokens, recorded)
    _decode(decode, sequence, config, tokens + 1)
    return ExpectedTime(prefill.us * 1e-3, decode.us * 1e-3, prefill.transfers, decode.transfers)


def _prefill(
    count: _Count, sequence: KernelSequence, config: ModelConfig, rows: int, tokens: int, recorded: bool
) -> None:
    from llms.llama_kernel_builder.device_config import attends_on_device, device_config

    padded = device_config(config)
    count.host("eos_pad", nbytes=8 * rows)
    count.host("embed_lookup", nbytes=4 * rows * config.emb_dim)
    x = _Value(_BF16 * rows * padded.emb_dim, True, False)
    blocks = list(sequence.prefill_blocks(config, rows))
    for _ in range(config.n_layers):
        values = {"x": x, "residual": x}
        for block in blocks:
            if block.name == "flash_attn" and not attends_on_device(config):
                continue
            if "attn" not in values and _takes_attention(block):
                values["attn"] = _host_attention(count, config, rows, _BF16 * rows * padded.q_dim, values)
            values.update(count.run(block, _inputs(block, values)))
        for name in "kv":
            count.read(_ready(name, values))
        count.host("kv_cache_extract", nbytes=4 * tokens * config.kv_dim)
        x = values["out"]
        if recorded:
            count.read(x)
    for _ in range(tokens if recorded else 0):
        _final_norm(count, config)
    _head(count, sequence, config, x)


def _decode(count: _Count, sequence: KernelSequence, config: ModelConfig, positions: int) -> None:
    from llms.llama_kernel_builder.device_config import device_config

    padded = device_config(config)
    count.host("embed_lookup", nbytes=4 * config.emb_dim)
    x = _Value(_BF16 * padded.emb_dim, True, False)
    blocks = list(sequence.decode_blocks(config))
    read = 4 * config.kv_dim * positions
    for _ in range(config.n_layers):
        values = {"x": x, "residual": x}
        for name, heads in (("table_q", padded.n_heads), ("table_k", padded.n_kv_heads)):
            values[name] = _Value(_BF16 * heads * padded.head_dim, True, False)
        for block in blocks:
            if "attn" not in values and _takes_attention(block):
                for name in "qkv":
                    count.read(_ready(name, values))
                count.host("decode_attention_cpu", nbytes=read, flops=4 * config.q_dim * positions)
                values["attn"] = _Value(_BF16 * padded.q_dim, True, False)
            values.update(count.run(block, _inputs(block, values)))
        x = values["out"]
    _head(count, sequence, config, x)


def _head(count: _Count, sequence: KernelSequence, config: ModelConfig, x: _Value) -> None:
    count.read(x)
    _final_norm(count, config)
    block = sequence.lm_head(config)
    row = next(buffer for buffer in block.buffers if buffer.role == "input")
    for value in count.run(block, {row.name: _Value(row.nbytes, True, False)}).values():
        count.read(value)


def _final_norm(count: _Count, config: ModelConfig) -> None:
    count.host("final_rms_norm", nbytes=6 * config.emb_dim, flops=4 * config.emb_dim)


def _takes_attention(block: Block) -> bool:
    return any(buffer.name == "attn" and buffer.role == "input" for buffer in block.buffers)


def _inputs(block: Block, values: Mapping[str, _Value]) -> dict[str, _Value]:
    """Values by the names of a block's inputs; attention calls q, k and v what has been through RoPE."""
    found = {}
    for buffer in block.buffers:
        if buffer.role == "input":
            found[buffer.name] = values[buffer.name] if buffer.name in values else _ready(buffer.name, values)
    return found


def _ready(name: str, values: Mapping[str, _Value]) -> _Value:
    """Q, K or V as attention reads it: after RoPE, after the bias."""
    for key in (f"{name}_roped", f"{name}_biased", name):
        if key in values:
            return values[key]
    raise KeyError(f"no program puts out {name!r}; there are {', '.join(values)}")


def _host_attention(
    count: _Count, config: ModelConfig, rows: int, nbytes: int, values: Mapping[str, Any]
) -> _Value:
    for name in "qkv":
        count.read(_ready(name, values))
    count.host(
        "prefill_attention_cpu",
        nbytes=2 * _BF16 * rows * (config.q_dim + config.kv_dim),
        flops=4 * config.q_dim * rows * rows,
    )
    return _Value(nbytes, True, False)
