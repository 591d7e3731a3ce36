"""Model configuration, read from a Hugging Face config.json and never defaulted silently.

transformers 4 writes `rope_theta`, `rope_scaling` and `torch_dtype`; transformers 5 writes
`rope_parameters` and `dtype`. Both are read; a file that has both must agree with itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from .config_evidence import from_evidence
from .exceptions import ConfigError, OutOfScope

# model_type -> (qkv_bias, o_bias, qk_norm): traits of the architecture; None: `attention_bias` decides.
# Mistral without its sliding window is a Llama (transformers 5, modeling_mistral).
_FAMILIES: dict[str, tuple[bool | None, bool | None, bool]] = {
    "llama": (None, None, False),
    "mistral": (False, False, False),
    "qwen2": (True, False, False),
    "qwen3": (None, None, True),
}
# The fields that say how large a model is; another checkpoint of the same architecture may differ in them.
SIZES = ("n_layers", "emb_dim", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size")
_FUSED = ("phi3", "chatglm", "internlm2", "gpt_neox", "baichuan")
_ROPE_TYPES = ("default", "llama3", "linear")


@dataclass(frozen=True)
class RopeScaling:
    """RoPE frequency scaling. kind: `default`, `linear` (factor) or `llama3` (all fields)."""

    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0


@dataclass(frozen=True)
class ModelConfig:
    """What the kernels need to know of a decoder-only model. Field names follow the mlir-air examples."""

    model_type: str
    n_layers: int
    emb_dim: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    vocab_size: int
    rope_theta: float
    rope_scaling: RopeScaling
    rms_eps: float
    tied_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    max_position: int
    eos_token_ids: tuple[int, ...]
    o_bias: bool = False

    @property
    def pad_token(self) -> int:
        """Token that fills a prompt up to its bucket: the end token, or 0 for a model that has none."""
        return self.eos_token_ids[0] if self.eos_token_ids else 0

    @property
    def q_dim(self) -> int:
        """Width of the query projection (differs from emb_dim where head_dim is explicit)."""
        return self.n_heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of the key and of the value projection."""
        return self.n_kv_heads * self.head_dim

    @classmethod
    def from_hf_folder(cls, folder: Path) -> ModelConfig:
        """Read `config.json` (and `generation_config.json` for end tokens) of a checkpoint folder.

        What an older config.json does not say is read from the shapes of the weights and from the
        tokenizer, never assumed. Raises ConfigError naming file and field when a field is missing or
        contradicts another, OutOfScope for an architecture that is not deployed here.
        """
        path = Path(folder) / "config.json"
        data = _read_json(path)
        generation = Path(folder) / "generation_config.json"
        if generation.is_file():
            data = {**data, "_generation_eos": _read_json(generation).get("eos_token_id")}
        data = from_evidence(data, Path(folder))
        return cls.from_hf_dict(data, source=str(path))

    @classmethod
    def from_config_file(cls, path: Path) -> ModelConfig:
        """Read a config.json alone, for which there need be no weights and no end token.

        Raises ConfigError and OutOfScope as `from_hf_folder`.
        """
        return cls.from_hf_dict({**_read_json(Path(path)), "_no_end_token": True}, source=str(path))

    @classmethod
    def from_hf_dict(cls, data: Mapping[str, Any], source: str = "config") -> ModelConfig:
        """Read a config mapping in transformers 4 or 5 form. Raises ConfigError as `from_hf_folder`."""
        read = _Reader(data, source)
        family = read.need("model_type", str)
        for reason in _out_of_scope(data, family):
            raise OutOfScope(f"{source}: {reason}")
        bias_rule, o_bias_rule, qk_norm = _FAMILIES[family]
        n_heads = read.need("num_attention_heads", int)
        emb_dim = read.need("hidden_size", int)
        head_dim = data.get("head_dim")
        if head_dim is None:
            if emb_dim % n_heads:
                raise ConfigError(
                    f"{source}: head_dim is absent and hidden_size {emb_dim} / {n_heads} heads is not whole"
                )
            head_dim = emb_dim // n_heads
        if head_dim % 2:
            raise ConfigError(
                f"{source}: head_dim {head_dim} is odd, rotary embedding turns pairs of elements"
            )
        n_kv = read.need("num_key_value_heads", int)
        if n_heads % n_kv:
            raise ConfigError(f"{source}: {n_heads} query heads cannot be grouped over {n_kv} KV heads")
        theta, scaling = _rope(data, source)
        stated = bool(read.need("attention_bias", bool)) if bias_rule is None else False
        return cls(
            model_type=family,
            n_layers=read.need("num_hidden_layers", int),
            emb_dim=emb_dim,
            n_heads=n_heads,
            n_kv_heads=n_kv,
            head_dim=int(head_dim),
            hidden_dim=read.need("intermediate_size", int),
            vocab_size=read.need("vocab_size", int),
            rope_theta=theta,
            rope_scaling=scaling,
            rms_eps=float(read.need("rms_norm_eps", float)),
            tied_embeddings=bool(read.need("tie_word_embeddings", bool)),
            qkv_bias=stated if bias_rule is None else bias_rule,
            qk_norm=qk_norm,
            max_position=read.need("max_position_embeddings", int),
            eos_token_ids=_eos(data, source),
            o_bias=stated if o_bias_rule is None else o_bias_rule,
        )

    def as_dict(self) -> dict[str, Any]:
        """All fields as JSON-able data."""
        return asdict(self)


class _Reader:
    """Field access that names file and field in every error."""

    def __init__(self, data: Mapping[str, Any], source: str) -> None:
        self._data = data
        self._source = source

    def need(self, field: str, kind: type) -> Any:
        """Return a field of the given type (an int passes for a float)."""
        value = self._data.get(field)
        if value is None:
            raise ConfigError(f"{self._source}: field '{field}' is missing")
        accepted = (int, float) if kind is float else (kind,)
        if not isinstance(value, accepted) or (kind is not bool and isinstance(value, bool)):
            raise ConfigError(f"{self._source}: field '{field}' is {value!r}, expected {kind.__name__}")
        return value


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; a checkpoint folder holds config.json beside its weights")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds {type(data).__name__}, expected an object")
    return data


def _out_of_scope(data: Mapping[str, Any], family: str) -> Iterator[str]:
    """Parts of the architecture that are not deployed here, one sentence each."""
    if data.get("is_encoder_decoder"):
        yield f"'{family}' is an encoder-decoder model; only decoder-only ones are in scope"
    if data.get("kv_lora_rank"):
        yield f"'{family}' uses multi-head latent attention (kv_lora_rank); out of scope"
    for field in ("num_local_experts", "num_experts", "n_routed_experts"):
        if data.get(field):
            yield f"'{family}' has {data[field]} experts ({field}); MoE is out of scope"
    supported = f"supported: {', '.join(_FAMILIES)}"
    if family in _FUSED:
        yield (f"model_type '{family}' stores its projections fused in one matrix; out of scope, {supported}")
    if family not in _FAMILIES:
        yield f"model_type '{family}' is out of scope; {supported}"
    if data.get("quantization_config"):
        method = data["quantization_config"].get("quant_method", "unknown method")
        yield f"the weights are quantised ({method}); only bf16, f16 and f32 weights are in scope"
    window = data.get("sliding_window")
    if window and data.get("use_sliding_window", family not in ("qwen2", "qwen3")):
        yield f"an active sliding window of {window} tokens is out of scope"
    if other := sorted({str(kind) for kind in data.get("layer_types") or ()} - {"full_attention"}):
        yield f"layer_types names layers of {', '.join(other)}; only full attention is in scope"
    for field in ("hidden_act", "hidden_activation"):
        if data.get(field, "silu") not in ("silu", "swish"):
            yield f"{field} '{data[field]}' is out of scope; SwiGLU needs silu"
    if "layer_norm_eps" in data:
        yield "layer_norm_eps is set: the model has LayerNorm; only RMSNorm is in scope"
    if data.get("mlp_bias"):
        yield "mlp_bias is set; biases of the feed-forward part are out of scope"
    if data.get("partial_rotary_factor", 1.0) != 1.0:
        yield f"partial_rotary_factor {data['partial_rotary_factor']} is out of scope"


def _rope(data: Mapping[str, Any], source: str) -> tuple[float, RopeScaling]:
    new = data.get("rope_parameters") or {}
    if any(isinstance(value, Mapping) for value in new.values()):
        raise OutOfScope(f"{source}: rope_parameters differ between kinds of layers; out of scope")
    old = data.get("rope_scaling") or {}
    theta = new.get("rope_theta", data.get("rope_theta"))
    if theta is None:
        raise ConfigError(f"{source}: neither rope_theta nor rope_parameters.rope_theta is given")
    if "rope_theta" in new and data.get("rope_theta") not in (None, new["rope_theta"]):
        raise ConfigError(
            f"{source}: rope_theta {data['rope_theta']} contradicts rope_parameters' {new['rope_theta']}"
        )
    fields = new if new else old
    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in _ROPE_TYPES:
        raise OutOfScope(f"{source}: rope type '{kind}' is out of scope; supported: {', '.join(_ROPE_TYPES)}")
    if kind == "default":
        return float(theta), RopeScaling()
    wanted = ["factor"]
    if kind == "llama3":
        wanted += ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"]
    missing = [name for name in wanted if name not in fields]
    if missing:
        raise ConfigError(f"{source}: rope type '{kind}' lacks {', '.join(missing)}")
    if kind == "linear":
        return float(theta), RopeScaling("linear", float(fields["factor"]))
    factor, low, high, length = (float(fields[name]) for name in wanted)
    return float(theta), RopeScaling("llama3", factor, low, high, int(length))


def _eos(data: Mapping[str, Any], source: str) -> tuple[int, ...]:
    ids: list[int] = []
    for value in (data.get("eos_token_id"), data.get("_generation_eos")):
        for token in value if isinstance(value, list) else [value]:
            if token is not None and int(token) not in ids:
                ids.append(int(token))
    if not ids and not data.get("_no_end_token"):
        raise ConfigError(f"{source}: no eos_token_id; generation would never stop")
    return tuple(ids)
