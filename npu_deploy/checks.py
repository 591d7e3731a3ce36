"""Is this checkpoint one that can be deployed? Everything is decided before anything is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from npu_deploy.errors import BAD_CHECKPOINT, OUT_OF_SCOPE, PRECONDITION, USAGE, DeployError

if TYPE_CHECKING:
    from llms.checkpoints import Checkpoint, TensorEntry
    from llms.llama_kernel_builder.model_config import ModelConfig

TARGETS = {
    "npu2": "",
    "npu1": "npu1 (Phoenix, Hawk Point; AIE2) has another array and other number formats; "
    "the kernels and the twin here are those of npu2 (AIE2P)",
}
DTYPES = {
    "bf16": "",
    "fp16": "fp16 has no matrix unit on npu2, and its range does not hold the activations of these models; "
    "weights stored as fp16 are deployed as bf16",
}
# Buffers that old releases of transformers saved among the weights; they are computed, not loaded.
_COMPUTED = (".rotary_emb.inv_freq", ".attn.bias", ".masked_bias")


@dataclass(frozen=True)
class Candidate:
    """A checkpoint that can be deployed, with its configuration and what is worth saying about it."""

    checkpoint: Checkpoint
    config: ModelConfig
    chat: bool
    notes: tuple[str, ...]


def check_request(target: str, dtype: str) -> None:
    """Refuse a target or dtype that is not offered, with the reason. Raises DeployError."""
    for option, value, known in (("--target", target, TARGETS), ("--dtype", dtype, DTYPES)):
        reason = known.get(value)
        if reason is None:
            offered = ", ".join(key for key, why in known.items() if not why)
            raise DeployError(f"{option} {value} is not known; offered: {offered}", USAGE)
        if reason:
            raise DeployError(f"{option} {value} is refused: {reason}", USAGE)


def examine(source: str) -> Candidate:
    """Read and check the checkpoint behind an HF id, an HF folder or a GGUF file.

    Raises DeployError: out of scope (exit code 3), or missing, torn or contradictory (6).
    """
    from llms.checkpoints import CheckpointError, resolve, tensor_table
    from llms.llama_kernel_builder.exceptions import ConfigError, OutOfScope
    from llms.llama_kernel_builder.model_config import ModelConfig

    folder = Path(source).expanduser()
    try:
        if (folder / "config.json").is_file():
            # The architecture is judged first: what is out of scope needs no complete download.
            config = ModelConfig.from_hf_folder(folder)
        checkpoint = resolve(str(folder.absolute()) if folder.exists() else source)
        config = ModelConfig.from_hf_folder(checkpoint.path)
        notes = compare_with_weights(config, tensor_table(checkpoint.path), checkpoint.path)
    except OutOfScope as error:
        raise DeployError(str(error), OUT_OF_SCOPE) from error
    except (ConfigError, CheckpointError) as error:
        raise DeployError(str(error), BAD_CHECKPOINT) from error
    chat = check_tokenizer(checkpoint.path, config)
    return Candidate(checkpoint, config, chat, tuple(notes))


def compare_with_weights(config: ModelConfig, table: Mapping[str, TensorEntry], folder: Path) -> list[str]:
    """Hold the configuration against the tensors of the file, both ways; returns notes.

    Raises ConfigError with one sentence about the first contradiction: tied flag, head_dim, biases, a
    missing, unused or mis-shaped tensor, a dtype that is no floating point.
    """
    from llms.llama_kernel_builder.exceptions import ConfigError
    from llms.llama_kernel_builder.weights import expected_tensors

    expected = expected_tensors(config)
    problem = (
        _tied_problem(config, table)
        or _width_problem(config, table, expected)
        or _missing_problem(table, expected)
        or _unused_problem(config, table, expected)
    )
    if problem:
        raise ConfigError(f"{folder}: {problem}")
    stored = sorted({table[name].dtype for name in expected})
    odd = [dtype for dtype in stored if dtype not in ("BF16", "F16", "F32")]
    if odd:
        raise ConfigError(
            f"{folder}: weights of type {', '.join(odd)} are out of scope; use bf16, f16 or f32"
        )
    return (
        []
        if stored == ["BF16"]
        else [f"weights are stored as {', '.join(stored)}: rounded to bf16 on loading"]
    )


def _tied_problem(config: ModelConfig, table: Mapping[str, TensorEntry]) -> str:
    head, embedding = table.get("lm_head.weight"), table.get("model.embed_tokens.weight")
    if not config.tied_embeddings and head is None:
        return (
            "config.json says tie_word_embeddings = false, but the weights have no lm_head.weight: "
            "the tied flag contradicts the file"
        )
    if config.tied_embeddings and head is not None and embedding is not None and not _equal(head, embedding):
        return (
            "config.json says tie_word_embeddings = true, but the weights hold an lm_head.weight that "
            "differs from the embedding: the tied flag contradicts the file"
        )
    return ""


def _equal(a: TensorEntry, b: TensorEntry) -> bool:
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    size, step = a.end - a.start, 1 << 24
    with a.file.open("rb") as one, b.file.open("rb") as two:
        one.seek(a.start)
        two.seek(b.start)
        return all(
            one.read(min(step, size - done)) == two.read(min(step, size - done))
            for done in range(0, size, step)
        )


def _width_problem(
    config: ModelConfig, table: Mapping[str, TensorEntry], expected: Mapping[str, tuple[int, ...]]
) -> str:
    for name, shape in expected.items():
        if name not in table or table[name].shape == shape:
            continue
        text = f"tensor '{name}' is {_times(table[name].shape)}, config.json makes it {_times(shape)}"
        part = name.rsplit(".", 2)[-2]
        if part in ("q_norm", "k_norm") or (part == "q_proj" and table[name].shape[1:] == shape[1:]):
            text += f" ({config.n_heads} heads of head_dim {config.head_dim}): head_dim is wrong"
        if part in ("k_proj", "v_proj") and table[name].shape[1:] == shape[1:]:
            text += (
                f" ({config.n_kv_heads} key-value heads of head_dim {config.head_dim}): one of both is wrong"
            )
        return text
    return ""


def _missing_problem(table: Mapping[str, TensorEntry], expected: Mapping[str, tuple[int, ...]]) -> str:
    missing = [name for name in expected if name not in table]
    if not missing:
        return ""
    what = "bias" if missing[0].endswith(".bias") else "tensor"
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"{what} '{missing[0]}'{more} is missing from the weights; the architecture needs it"


def _unused_problem(
    config: ModelConfig, table: Mapping[str, TensorEntry], expected: Mapping[str, tuple[int, ...]]
) -> str:
    known = {*expected, "lm_head.weight"}
    unused = [name for name in table if name not in known and not name.endswith(_COMPUTED)]
    if not unused:
        return ""
    more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
    return (
        f"tensor '{unused[0]}'{more} is in the weights, but a {config.model_type} model with this "
        "config.json has no place for it"
    )


def _times(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def check_tokenizer(folder: Path, config: ModelConfig) -> bool:
    """Load the tokenizer and encode the gate prompts; True when it has a chat template.

    Raises DeployError when it does not load, or gives ids that the embedding has no row for.
    """
    from transformers import AutoTokenizer

    from llms.verify.contract.chat import encode_prompt
    from llms.verify.contract.deployment import GENERATED
    from llms.verify.contract.prompts import PromptStyle, load_prompts

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except Exception as error:  # its exception types differ by file format and release
        first = str(error).strip().splitlines()
        raise DeployError(
            f"{folder}: the tokenizer does not load ({type(error).__name__}: {first[0] if first else ''}); "
            "add the complete tokenizer files of the model",
            BAD_CHECKPOINT,
        ) from error
    least = len(encode_prompt(tokenizer, "A", "base").ids) + GENERATED
    if config.max_position < least:
        raise DeployError(
            f"{folder}: max_position_embeddings is {config.max_position}; the gates generate {GENERATED} "
            f"tokens behind a prompt, which takes at least {least} positions",
            PRECONDITION,
        )
    chat = bool(getattr(tokenizer, "chat_template", None))
    style: PromptStyle = "instruct" if chat else "base"
    for text in load_prompts(style):
        ids = encode_prompt(tokenizer, text, style).ids
        if not len(ids) or max(ids) >= config.vocab_size:
            raise DeployError(
                f"{folder}: the tokenizer gives ids up to {max(ids, default=-1)}, vocab_size is "
                f"{config.vocab_size}; tokenizer and weights do not belong together",
                BAD_CHECKPOINT,
            )
    return chat
