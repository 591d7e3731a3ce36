"""Hugging Face's own model with the device's arithmetic injected.

Weights, cache, masks, positions and the order of layers stay those of transformers; what is replaced is how
each operation computes: projections, attention, norms, rotary embedding, residual adds and the activation.
Nothing of a deployment's assembly is involved, so an assembly fault shows as a difference.

The injection is strict. A module that it does not know, an operation that should have become a launch and
did not, or a different number of launches in a forward pass is an error, never a silent return to plain
arithmetic.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal, localcontext
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from llms.verify.contract.records import Array, frozen_copy
from llms.verify.reference.arithmetic import (
    DeviceArithmetic,
    LinearArithmetic,
    PhaseArithmetic,
    elementwise,
    products,
)
from llms.verify.reference.arithmetic import attention as attention_kernels
from llms.verify.reference.arithmetic.description import LINEARS, Role
from llms.verify.reference.hf import cache_parameter, to_numpy, to_torch

ATTENTION = "npu2_matched"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
_ACTIVATIONS = ("SiLU", "SiLUActivation")


class InjectionError(RuntimeError):
    """The model's code is not what the injection knows; the text names what was met."""


@dataclass(frozen=True, eq=False)
class Decoded:
    """Outcome of T decode steps run as rows.

    Attributes:
        logits: ``[T, vocab]`` bf16.
        outputs: ``[n_layers, T, emb]`` bf16, output of every layer.
        keys, values: ``[n_layers, n_kv_heads, T, head_dim]`` bf16, the new slots.
    """

    logits: Array
    outputs: Array
    keys: Array
    values: Array


class _Pending(torch.Tensor):
    """Output of a launch that is consumed by an element-wise launch: the only operation it allows."""

    operation: str
    launch: Callable[[Any, Any], Any]

    @classmethod
    def of(cls, tensor: Any, operation: str, launch: Callable[[Any, Any], Any]) -> Any:
        pending = tensor.as_subclass(cls)
        pending.operation = operation
        pending.launch = launch
        return pending

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            pending = next(item for item in args if isinstance(item, cls))
            name = func.__name__.strip("_")
            fits = len(args) == 2 and not kwargs and all(isinstance(item, torch.Tensor) for item in args)
            if name.removeprefix("r") != pending.operation or not fits or args[0].shape != args[1].shape:
                raise InjectionError(
                    f"transformers applies {func.__name__!r} where the device has a launch "
                    f"{pending.operation!r}: this version's model code is not known to the injection"
                )
            plain = [item.as_subclass(torch.Tensor) for item in args]
            return pending.launch(*plain)


class MatchedModel:
    """A causal language model of transformers that computes as the device does, prompt by prompt.

    Args:
        model: ``LlamaForCausalLM``, ``Qwen2ForCausalLM`` or ``Qwen3ForCausalLM`` in bf16; it is changed.
        reorder: seed that permutes the blocks of every sum over K and the terms of every norm, for measuring
            what the order of f32 sums is worth; None keeps the order.

    Raises:
        InjectionError: another architecture, dtype, activation, or modules that are not known.
    """

    def __init__(self, model: Any, *, reorder: int | None = None) -> None:
        family = getattr(model.config, "model_type", None)
        if family not in FAMILIES:
            raise InjectionError(f"model type {family!r} has no injection; there are {', '.join(FAMILIES)}")
        if model.dtype != torch.bfloat16:
            raise InjectionError(f"the matched reference needs a bf16 model, not {model.dtype}")
        self.model = model.eval()
        self.body = model.model
        self.layers = self.body.layers
        self._arithmetic: DeviceArithmetic | None = None
        self._phase: PhaseArithmetic | None = None
        self._counts: Counter[str] = Counter()
        self._generator = None if reorder is None else np.random.default_rng(reorder)
        self._expected = self._inject()
        self._cache: Any = None
        self._cache_name = cache_parameter(model)
        self._given: Any = None
        self._watched = False
        self._seen: list[Array] = []

    # -- injection -----------------------------------------------------------------------------------------

    def _inject(self) -> Counter[str]:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface, eager_mask

        AttentionInterface.register(ATTENTION, _attention)
        AttentionMaskInterface.register(ATTENTION, eager_mask)
        self.model.config._attn_implementation = ATTENTION
        expected: Counter[str] = Counter({"final_norm": 1, "lm_head": 1})
        for layer in self.layers:
            expected += self._inject_layer(layer)
        for index, layer in enumerate(self.layers):
            layer.register_forward_pre_hook(self._take_given(index))
            layer.register_forward_hook(self._see)
        self.body.norm.forward = self._final_norm(self.body.norm)
        self.model.lm_head.forward = self._linear(self.model.lm_head, "lm_head")
        self.body.rotary_emb.forward = _tables(self.body.rotary_emb, self.model.config)
        return expected

    def _inject_layer(self, layer: Any) -> Counter[str]:
        expected = Counter({"rope": 1, "attention": 1, "activation": 1, "attn_add": 1, "mlp_add": 1})
        known: dict[str, str] = {}
        for name in LINEARS:
            known[("self_attn." if name[0] in "qkv" or name == "o_proj" else "mlp.") + name] = name
        norms: dict[str, Role] = {
            "input_layernorm": "input_norm",
            "post_attention_layernorm": "post_norm",
            "self_attn.q_norm": "qk_norm",
            "self_attn.k_norm": "qk_norm",
        }
        for path, module in layer.named_modules():
            if path in known:
                module.forward = self._linear(module, known[path])
                expected["linear"] += 1
                if module.bias is not None:
                    expected["bias"] += 1
            elif path in norms:
                module.forward = self._norm(module, norms[path])
                expected["norm"] += 1
            elif path == "mlp.act_fn":
                if type(module).__name__ not in _ACTIVATIONS:
                    raise InjectionError(f"activation {type(module).__name__} is not SiLU")
                module.forward = self._activation
            elif path not in ("", "self_attn", "mlp"):
                raise InjectionError(f"module {path!r} ({type(module).__name__}) of a layer is not known")
        layer.self_attn.npu_matched = self.attend
        return expected

    def _take_given(self, index: int) -> Callable[[Any, Any], Any]:
        def hook(_module: Any, arguments: Any) -> Any:
            if self._given is None or index == 0:
                return None
            return (self._replaced(arguments[0], index - 1), *arguments[1:])

        return hook

    def _replaced(self, x: Any, index: int) -> Any:
        """Rows of ``x[1, n, emb]`` with what was given as the output of layer ``index`` in their place."""
        given = self._given[index]
        return torch.cat((given[None], x[:, given.shape[0] :]), 1)

    def _see(self, _module: Any, _arguments: Any, output: Any) -> None:
        if self._given is not None or self._watched:
            tensor = output[0] if isinstance(output, tuple) else output
            self._seen.append(to_numpy(tensor[0]))

    @property
    def _now(self) -> PhaseArithmetic:
        assert self._phase is not None
        return self._phase

    def _linear(self, module: Any, name: str) -> Callable[[Any], Any]:
        store = _Weights(module.weight, self._generator)

        def forward(x: Any) -> Any:
            if name == "lm_head":
                assert self._arithmetic is not None
                how = self._arithmetic.lm_head
                self._counts["lm_head"] += 1
            else:
                how = self._now.linears[name]
                self._counts["linear"] += 1
            out = store.multiply(x.reshape(-1, x.shape[-1]), how).view(*x.shape[:-1], -1)
            if module.bias is not None:
                self._counts["bias"] += 1
                out = elementwise.add(out, module.bias, self._now.rounding("bias"))
            if name == "o_proj":
                return self._before_add(out, "attn_add")
            return self._before_add(out, "mlp_add") if name == "down_proj" else out

        return forward

    def _before_add(self, out: Any, role: Role) -> Any:
        def launch(a: Any, b: Any) -> Any:
            self._counts[role] += 1
            return elementwise.add(a, b, self._now.rounding(role))

        return _Pending.of(out, "add", launch)

    def _activation(self, gate: Any) -> Any:
        rounding = self._now.rounding("activation")

        def launch(a: Any, b: Any) -> Any:
            self._counts["activation"] += 1
            return elementwise.multiply(a, b, rounding)

        return _Pending.of(elementwise.silu(gate, rounding), "mul", launch)

    def _norm(self, module: Any, role: Role) -> Callable[[Any], Any]:
        order = self._permutation(module.weight.shape[0])

        def forward(x: Any) -> Any:
            self._counts["norm"] += 1
            rounding, width = self._now.rounding(role), self._now.norm_widths.get(role, 0)
            if order is None:
                return elementwise.rms_norm(x, module.weight, module.variance_epsilon, rounding, width)
            weight = module.weight[order]
            turned = elementwise.rms_norm(x[..., order], weight, module.variance_epsilon, rounding, width)
            return turned[..., torch.argsort(order)]

        return forward

    def _permutation(self, length: int) -> Any:
        return None if self._generator is None else torch.from_numpy(self._generator.permutation(length))

    def _final_norm(self, module: Any) -> Callable[[Any], Any]:
        def forward(x: Any) -> Any:
            self._counts["final_norm"] += 1
            if self._given is not None:
                x = self._replaced(x, len(self.layers) - 1)
            return elementwise.final_norm(x, module.weight, module.variance_epsilon)

        return forward

    def _rotate(self, q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> tuple[Any, Any]:
        self._counts["rope"] += 1
        cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        rounding = self._now.rounding("rope")
        return elementwise.rope(q, cos, sin, rounding), elementwise.rope(k, cos, sin, rounding)

    def attend(self, query: Any, key: Any, value: Any, mask: Any) -> Any:
        """Attention of one layer: ``[1, heads, n, d]`` each, HF's additive mask; ``[1, n, heads, d]``."""
        self._counts["attention"] += 1
        how = self._now.attention
        hidden = None if mask is None else mask[0, 0, :, : key.shape[2]] != 0
        if how.method == "flash":
            if hidden is None:
                raise InjectionError("transformers gave no mask for a prompt")
            out = attention_kernels.flash(query[0], key[0], value[0], hidden, how)
        else:
            out = attention_kernels.host_attention(query[0], key[0], value[0], hidden)
        return out.transpose(0, 1).unsqueeze(0).contiguous()

    # -- running -------------------------------------------------------------------------------------------

    def prefill(self, prompt_ids: Sequence[int], arithmetic: DeviceArithmetic) -> Array:
        """Run a prompt from an empty cache; logits ``[vocab]`` of its last position, bf16."""
        ids = [int(token) for token in prompt_ids]
        self._arithmetic, self._phase = arithmetic, arithmetic.prefill
        self._cache = None
        padding = -len(ids) % products.BLOCK if arithmetic.prefill.attention.method == "flash" else 0
        logits = self._forward([*ids, *[arithmetic.pad_token] * padding], keep=[len(ids) - 1])
        if padding:
            self._cache.crop(-padding)
        self._phase = arithmetic.decode
        row: Array = logits[0]
        return row

    def decode(self, token: int) -> Array:
        """Run one token at the next position; logits ``[vocab]`` bf16."""
        if self._cache is None:
            raise RuntimeError("decode before prefill: there is no KV cache yet")
        row: Array = self._forward([int(token)], keep=[0])[0]
        return row

    @contextmanager
    def given(self, layer_outputs: Array) -> Iterator[list[Array]]:
        """Run the forward pass inside from somebody else's hidden states, layer by layer.

        ``layer_outputs``: ``[n_layers, n, emb]`` bf16, what another implementation's layers put out. Each
        layer (but the first) and the final norm then starts from these instead of from what came before it,
        so what it computes differs from the other's by its own arithmetic only. Yields a list that holds
        the output ``[n, emb]`` of every layer after the pass.
        """
        self._given, self._seen = to_torch(layer_outputs), []
        try:
            yield self._seen
        finally:
            self._given = None

    @contextmanager
    def watched(self) -> Iterator[list[Array]]:
        """Yield a list that holds the output ``[n, emb]`` of every layer after the forward pass inside.

        After a prefill the rows are those of the prompt and of its padding.
        """
        self._watched, self._seen = True, []
        try:
            yield self._seen
        finally:
            self._watched = False

    def decode_rows(self, tokens: Sequence[int], keys: Array, values: Array, layer_outputs: Array) -> Decoded:
        """Run several decode steps in one pass, as rows that start from somebody else's hidden states.

        Rows do not depend on each other's outputs when every layer's input is given, so one pass does for
        all steps what :meth:`decode` does one by one, in the arithmetic of decode.

        Args:
            tokens: the T tokens fed to the steps.
            keys, values: ``[n_layers, n_kv_heads, n, head_dim]`` bf16, the cache in front of the first step.
            layer_outputs: ``[n_layers, T, emb]`` bf16, what the other implementation's layers put out.
        """
        if self._cache is None:
            raise RuntimeError("decode before prefill: there is no KV cache yet")
        self.replace_cache(keys, values)
        n = keys.shape[2]
        with self.given(layer_outputs) as seen:
            logits = self._forward([int(token) for token in tokens], keep=list(range(len(tokens))))
        own_keys, own_values = self.kv_cache()
        return Decoded(logits, np.stack(seen), own_keys[:, :, n:], own_values[:, :, n:])

    @property
    def positions(self) -> int:
        """Positions that the cache holds; 0 before the first prefill."""
        return 0 if self._cache is None else int(self._cache.layers[0].keys.shape[2])

    def kv_cache(self) -> tuple[Array, Array]:
        """Copies of K and V, each ``[n_layers, n_kv_heads, positions, head_dim]`` bf16."""
        keys = torch.stack([layer.keys[0] for layer in self._cache.layers])
        values = torch.stack([layer.values[0] for layer in self._cache.layers])
        return to_numpy(keys), to_numpy(values)

    def replace_cache(self, keys: Array, values: Array) -> None:
        """Put K and V ``[n_layers, n_kv_heads, positions, head_dim]`` bf16 in place of the own cache."""
        for index, layer in enumerate(self._cache.layers):
            layer.keys, layer.values = to_torch(keys[index])[None], to_torch(values[index])[None]

    def _forward(self, tokens: list[int], keep: list[int]) -> Array:
        """Logits ``[len(keep), vocab]`` of the rows asked for."""
        self._counts.clear()
        given = {} if self._cache is None else {self._cache_name: self._cache}
        with torch.inference_mode(), self._rotation():
            output = self.model(
                input_ids=torch.tensor([tokens]), use_cache=True, logits_to_keep=torch.tensor(keep), **given
            )
        if self._counts != self._expected:
            odd = {
                name: (self._counts[name], self._expected[name])
                for name in sorted(set(self._counts) | set(self._expected))
                if self._counts[name] != self._expected[name]
            }
            raise InjectionError(f"launches made and expected in a forward pass differ: {odd}")
        self._cache = output[self._cache_name]
        return frozen_copy(to_numpy(output.logits[0]))

    @contextmanager
    def _rotation(self) -> Iterator[None]:
        """Put our rotary embedding in the place of the modelling module's, for one forward pass."""
        module = sys.modules[type(self.layers[0].self_attn).__module__]
        if not hasattr(module, "apply_rotary_pos_emb"):
            raise InjectionError(f"{module.__name__} has no apply_rotary_pos_emb")
        original = module.apply_rotary_pos_emb
        module.apply_rotary_pos_emb = self._rotate  # type: ignore[attr-defined]
        try:
            yield
        finally:
            module.apply_rotary_pos_emb = original  # type: ignore[attr-defined]


class _Weights:
    """One projection in the forms that its two phases need, each made once."""

    def __init__(self, weight: Any, generator: np.random.Generator | None) -> None:
        self._weight = weight.detach()
        self._quantised: Any = None
        self._order: Any = None
        if generator is not None:
            blocks = generator.permutation(weight.shape[1] // products.BLOCK)
            order = (blocks[:, None] * products.BLOCK + np.arange(products.BLOCK)).reshape(-1)
            # columns behind the last whole block stay there
            order = np.concatenate([order, np.arange(order.size, weight.shape[1])])
            self._order = torch.from_numpy(order)
            self._weight = self._weight[:, self._order]

    def multiply(self, x: Any, how: LinearArithmetic) -> Any:
        """``x[M, K]`` times the weight; bf16 ``[M, N]``."""
        if self._order is not None:
            x = x[:, self._order]
        if how.blocked:
            if self._quantised is None:
                self._quantised = products.quantised_weight(self._weight)
            return products.gemm(x, self._quantised, how)
        return products.gemv(x, self._weight, how)


def _attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, scaling: float, **_kwargs: Any
) -> tuple[Any, None]:
    if abs(scaling * query.shape[-1] ** 0.5 - 1.0) > 1e-6:
        raise InjectionError(f"attention scale {scaling} is not that of the kernel, 1/sqrt(head_dim)")
    return module.npu_matched(query, key, value, attention_mask), None


class _ExactPower(TorchFunctionMode):
    """Powers of a number rounded to f32 from forty digits; torch's own differ from CPU to CPU by one step."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in (torch.pow, torch.Tensor.__rpow__) and len(args) == 2:
            exponent, base = args if func is torch.Tensor.__rpow__ else args[::-1]
            if not isinstance(base, torch.Tensor):
                with localcontext() as digits:
                    digits.prec = 40
                    values = [float(Decimal(base) ** Decimal(e)) for e in exponent.tolist()]
                return torch.tensor(values, dtype=torch.float64).to(exponent.dtype)
        return func(*args, **(kwargs or {}))


def _frequencies(rotary: Any, config: Any) -> Any:
    """Inverse frequencies by HF's own code with exact powers; those of the model where these are others."""
    with _ExactPower():
        exact = type(rotary)(config).inv_freq
    given = rotary.inv_freq
    alike = given.dtype == exact.dtype and torch.allclose(exact, given, rtol=1e-6, atol=0.0)
    return exact if alike else given


def _tables(rotary: Any, config: Any) -> Callable[[Any, Any], tuple[Any, Any]]:
    """Cosine and sine of HF's own frequencies, angles in double precision, one cast to bf16."""
    frequencies = _frequencies(rotary, config).double()

    def forward(x: Any, position_ids: Any) -> tuple[Any, Any]:
        angles = position_ids[..., None].double() * frequencies
        both = torch.cat((angles, angles), -1)
        scale = rotary.attention_scaling
        return (both.cos() * scale).to(x.dtype), (both.sin() * scale).to(x.dtype)

    return forward
