"""Conversion of a GGUF file into an HF folder: once per file content, atomic, safe beside other processes."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llms.checkpoints._cache import cache_root, exclusive, file_sha256
from llms.checkpoints._folder import validate_folder
from llms.checkpoints._gguf_facts import GGUFFacts, compare_config, read_facts, shortest_decimal
from llms.checkpoints._types import CheckpointError

# Raise it when the output for the same GGUF changes: it is part of the folder's key.
CONVERTER_VERSION = 1
MANIFEST = "conversion.json"
_log = logging.getLogger("llms.checkpoints")
# Pre-tokenisers of ``tokenizer.ggml.pre`` that transformers sets by itself (it must then show a Split step).
_SET_BY_TRANSFORMERS = {"llama-bpe", "llama3", "llama-v3", "qwen2", "deepseek-r1-qwen", "tekken"}


def convert_gguf(path: Path) -> Path:
    """Return the HF folder for a GGUF file, converting it on first use.

    The folder lies in the cache under a key of the file's content and :data:`CONVERTER_VERSION`. It is built
    under a temporary name and renamed when complete, while an flock keeps other processes waiting, so a
    killed process leaves no half-made folder and no lock, and two processes convert once.

    Args:
        path: the GGUF file (architectures: see :data:`llms.checkpoints._gguf_facts.ARCHITECTURES`).

    Raises:
        CheckpointError: the file is missing, torn or unsupported, the disk is full, or the result does not
            agree with the file's metadata.
    """
    if not path.is_file():
        raise CheckpointError("does not exist", path=path, remedy="check the path")
    digest = file_sha256(path)
    folder = cache_root() / "checkpoints"
    name = f"{re.sub(r'[^A-Za-z0-9._-]+', '-', path.stem)}-{digest[:16]}-v{CONVERTER_VERSION}"
    target = folder / name
    if _is_intact(target):
        return target

    def waiting() -> None:
        _say(f"Waiting for another process that converts {path.name} ...")

    try:
        with exclusive(folder / f"{name}.lock", waiting):
            # The lock is ours, so temporary folders of this key belong to killed processes.
            for stale in folder.glob(f".{name}.*"):
                shutil.rmtree(stale, ignore_errors=True)
            if _is_intact(target):
                return target
            if target.exists():
                _log.warning("%s is damaged, converting again", target)
                shutil.rmtree(target)
            scratch = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=folder))
            try:
                started = time.perf_counter()
                _say(f"Converting {path.name} to a bf16 HF folder, once for this cache ...")
                _convert_into(path, digest, scratch)
                scratch.chmod(0o755)
                scratch.replace(target)
                _say(f"Converted {path.name} in {time.perf_counter() - started:.0f} s: {target}")
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(
            f"cannot be written ({error})",
            path=target,
            remedy="free about 300 MB or move the cache with PYTEST_NPU_CACHE",
        ) from error
    return target


def _say(text: str) -> None:
    _log.info(text)
    print(text, file=sys.stderr, flush=True)


def _is_intact(folder: Path) -> bool:
    """True when every file of a finished conversion still has the content it was written with."""
    try:
        files: dict[str, str] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
        return bool(files) and all(file_sha256(folder / name) == digest for name, digest in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _convert_into(path: Path, digest: str, scratch: Path) -> None:
    facts = read_facts(path)
    with _library_progress():
        _write_model(path, facts, scratch)
        _write_tokenizer(path, facts, scratch)
    compare_config(facts, json.loads((scratch / "config.json").read_text(encoding="utf-8")), scratch)
    validate_folder(scratch)
    for written in scratch.iterdir():
        written.chmod(0o644)
    manifest = {
        "source": path.name,
        "source_sha256": digest,
        "converter_version": CONVERTER_VERSION,
        "files": {item.name: file_sha256(item) for item in sorted(scratch.iterdir())},
    }
    (scratch / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _library_progress() -> Iterator[None]:
    """Let the progress bars of transformers show on a terminal, and swallow them elsewhere."""
    if sys.stderr.isatty():
        yield
        return
    with contextlib.redirect_stderr(io.StringIO()) as swallowed:
        try:
            yield
        except Exception:
            _log.debug("output of the libraries: %s", swallowed.getvalue()[-2000:])
            raise


def _write_model(path: Path, facts: GGUFFacts, scratch: Path) -> None:
    import torch
    import transformers

    arguments: dict[str, Any] = {"gguf_file": path.name, "dtype": torch.bfloat16, "local_files_only": True}
    if hasattr(transformers, "GgufConfig"):
        # Newer 5.x keeps the weights in GGUF blocks unless told otherwise; older 5.x always dequantises.
        arguments["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, output_loading_info=True, **arguments
    )
    trouble = {name: sorted(map(str, keys)) for name, keys in loading.items() if keys}
    if trouble:
        raise CheckpointError(
            f"transformers {transformers.__version__} could not place all tensors: {trouble}",
            path=path,
            remedy="use the original HF folder",
        )
    unlike = sorted({str(item.dtype) for item in model.state_dict().values() if item.dtype != torch.bfloat16})
    if unlike:
        raise CheckpointError(
            f"was not dequantised to bf16 (found {', '.join(unlike)})",
            path=path,
            remedy=f"transformers {transformers.__version__} is not supported: install the pinned version",
        )
    with contextlib.suppress(AttributeError):
        del model.config.quantization_config
    model.save_pretrained(scratch)
    target = scratch / "config.json"
    config = json.loads(target.read_text(encoding="utf-8"))
    config.pop("quantization_config", None)
    config.pop("_name_or_path", None)
    config.pop("_model_name_or_path", None)
    # The file keeps float32: the shortest decimal of the same float32 is what the model's authors wrote.
    if float(config["rms_norm_eps"]) != facts.config["rms_norm_eps"]:
        config["rms_norm_eps"] = shortest_decimal(config["rms_norm_eps"])
    target.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_tokenizer(path: Path, facts: GGUFFacts, scratch: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(
        path.parent, gguf_file=path.name, local_files_only=True, use_fast=True
    )
    _set_pre_tokenizer(tokenizer, facts, path)
    tokenizer.model_max_length = facts.config["max_position_embeddings"]
    tokenizer.save_pretrained(scratch)
    settings = scratch / "tokenizer_config.json"
    config = json.loads(settings.read_text(encoding="utf-8"))
    for passing in ("is_local", "local_files_only", "name_or_path", "gguf_file"):
        config.pop(passing, None)
    settings.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _check_tokenizer(transformers.AutoTokenizer.from_pretrained(scratch, local_files_only=True), facts, path)


def _set_pre_tokenizer(tokenizer: Any, facts: GGUFFacts, path: Path) -> None:
    """Restore how text is split before byte-pair merging; transformers drops what it does not know."""
    from tokenizers import pre_tokenizers

    kind = facts.pre_tokenizer
    backend = tokenizer.backend_tokenizer
    if kind == "smollm":
        # llama.cpp, LLAMA_VOCAB_PRE_TYPE_SMOLLM: every digit alone, then the GPT-2 split.
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    elif kind in _SET_BY_TRANSFORMERS:
        if "Split" not in repr(backend.pre_tokenizer):
            raise CheckpointError(
                f"pre-tokeniser {kind!r} was not set by this transformers",
                path=path,
                remedy="install the pinned transformers, or use the original HF folder",
            )
    elif kind not in ("gpt-2", "default", ""):
        raise CheckpointError(
            f"has the unknown pre-tokeniser {kind!r}: text would be split differently",
            path=path,
            remedy="use the original HF folder",
        )


def _check_tokenizer(tokenizer: Any, facts: GGUFFacts, path: Path) -> None:
    """Compare the saved tokenizer with the GGUF's: all tokens, special ids, chat template, begin token."""
    wrong: list[str] = []
    found = tokenizer.convert_ids_to_tokens(list(range(len(facts.tokens))))
    different = [index for index, token in enumerate(facts.tokens) if found[index] != token]
    if different:
        first = different[0]
        wrong.append(
            f"{len(different)} tokens differ, first id {first}: {found[first]!r}, not {facts.tokens[first]!r}"
        )
    for name, index in facts.special_ids.items():
        if getattr(tokenizer, f"{name}_id") != index:
            wrong.append(f"{name}_id is {getattr(tokenizer, f'{name}_id')}, the GGUF says {index}")
    for index in facts.control_ids:
        ids = tokenizer.encode(facts.tokens[index], add_special_tokens=False)
        if ids != [index]:
            wrong.append(f"control token {facts.tokens[index]!r} encodes to {ids}, not [{index}]")
    if facts.chat_template is not None and tokenizer.chat_template != facts.chat_template:
        wrong.append("the chat template differs")
    begins = tokenizer.encode("a")[:1] == [facts.special_ids.get("bos_token")]
    if begins != facts.adds_bos:
        wrong.append(f"the begin token is {'' if begins else 'not '}added, the GGUF says the opposite")
    if wrong:
        raise CheckpointError(
            "tokenizer and GGUF disagree: " + "; ".join(wrong[:5]),
            path=path,
            remedy="use the original HF folder",
        )
