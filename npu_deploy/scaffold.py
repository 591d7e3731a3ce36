"""Make a model folder: rendered from templates, staged, then moved into place in one step."""

from __future__ import annotations

import json
import keyword
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llms.llama_kernel_builder.deployment import describe
from llms.llama_kernel_builder.generic import generic_sequence
from llms.verify.contract.models import ROOT, in_checkout, remember
from npu_deploy import rows
from npu_deploy.checks import Candidate
from npu_deploy.errors import PRECONDITION, USAGE, DeployError, environment

if TYPE_CHECKING:
    from llms.llama_kernel_builder.llama_loop import KernelSequence
    from llms.llama_kernel_builder.model_config import ModelConfig

TEMPLATES = Path(__file__).parent / "templates" / "model"
RECORD = "deployment.json"


def model_name(source: str, wanted: str | None) -> str:
    """Folder and module name for a checkpoint. Raises DeployError for a name Python cannot import."""
    if wanted is not None:
        if not wanted.isidentifier() or keyword.iskeyword(wanted) or wanted.startswith("_"):
            raise DeployError(f"--name {wanted!r} is no module name: use letters, digits and _", USAGE)
        return wanted
    path = Path(source).expanduser()
    last = path.absolute().name if path.exists() else source.rsplit("/", 1)[-1]
    name = re.sub(r"[^a-z0-9]+", "_", last.lower().removesuffix(".gguf")).strip("_")
    if not name:
        raise DeployError(f"no folder name can be made from {source!r}; give one with --name", USAGE)
    return f"m_{name}" if name[0].isdigit() or keyword.iskeyword(name) else name


def place(name: str, into: Path | None) -> Path:
    """Where the folder will be. Raises DeployError when it exists or cannot be written."""
    default = ROOT if in_checkout() else Path.cwd()
    parent = into.expanduser().absolute() if into is not None else default
    folder = parent / name
    if folder.exists():
        raise DeployError(f"{folder} exists; choose another name with --name, or remove it", PRECONDITION)
    probe = next(path for path in (parent, *parent.parents) if path.exists())
    if not probe.is_dir() or not os.access(probe, os.W_OK):
        raise DeployError(f"{parent} cannot be written; name another folder with --into DIR", PRECONDITION)
    return folder


def registry_of(folder: Path) -> Path:
    """The registry that gets the rows: the project's for a folder of the project, else the folder's own."""
    from kernel_registry import registry_lookup

    return registry_lookup.roots()[0] if folder.parent == ROOT else folder / "kernel_registry"


def make(candidate: Candidate, name: str, folder: Path, source: str) -> dict[str, int]:
    """Stage the folder, sweep its rows, compile everything for the twin, move it into place.

    Whatever fails leaves no folder. Returns what became of the kernel rows. Raises DeployError.
    """
    from kernel_registry.registry_lookup import ENV
    from llms.llama_kernel_builder.llama_loop import buckets_of, required_kernels

    local = folder.parent != ROOT
    folder.parent.mkdir(parents=True, exist_ok=True)
    registry = registry_of(folder)
    if not local:
        rows.check_writable(registry)
    _clear_stages(folder.parent)
    stage = Path(tempfile.mkdtemp(prefix=f".{name}.{os.getpid()}.", suffix=".part", dir=folder.parent))
    try:
        swept_into = stage / "kernel_registry" if local else registry
        sequence = generic_sequence()
        needs = required_kernels(sequence, candidate.config, buckets_of(candidate.config))
        swept = rows.sweep_rows(needs, swept_into, name)
        # lookups see a registry that is not in its place yet
        named = os.environ.get(ENV)
        with environment(ENV, os.pathsep.join(filter(None, [str(swept_into), named]))):
            _compile(sequence, candidate.config)
        context = context_of(candidate.config, name, title_of(source, name), local=local)
        context |= {
            "choice": "instruct" if candidate.chat else "base",
            "source": _text(source),
            "checkpoint_words": f"`{source}`",
        }
        for path, text in rendered(context).items():
            target = stage / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        (stage / RECORD).write_text(_record(candidate, name, source), encoding="utf-8")
        stage.chmod(0o755)
        stage.rename(folder)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    if local:
        remember(folder)
    return swept


def _clear_stages(parent: Path) -> None:
    """Remove what a command that was killed has left: a stage whose process is gone."""
    for stage in parent.glob(".*.part"):
        pid = stage.name.split(".")[-3] if stage.name.count(".") >= 4 else ""
        if pid.isdigit() and not Path("/proc", pid).exists():
            shutil.rmtree(stage, ignore_errors=True)


def title_of(source: str, name: str) -> str:
    """What documents call the model."""
    path = Path(source).expanduser()
    return path.absolute().name if path.exists() else source.rsplit("/", 1)[-1] or name


def context_of(config: ModelConfig, name: str, title: str, *, local: bool) -> dict[str, Any]:
    """Everything the templates need that follows from the configuration."""
    from pytest_npu.core.constants import PHASES

    from llms.llama_kernel_builder.device_config import attends_on_device, deviations, ffn_form
    from llms.llama_kernel_builder.elfs import qkv_of

    prefill, decode, partitions = describe.elf_rows(generic_sequence(), config, seq_len=128)
    table = ["| ELF | launches |", "|---|---|"]
    traits = [
        text
        for text, present in (
            ("bias on Q, K and V", config.qkv_bias),
            ("a norm per head on Q and K", config.qk_norm),
        )
        if present
    ]
    steps = ["RMSNorm", "Q, K, V + bias" if config.qkv_bias else "Q, K, V"]
    steps += ["norm per head of Q, K"] * config.qk_norm + ["RoPE"]
    qkv, qkv_gemv = qkv_of(config)
    head_first = config.head_dim > 64
    return {
        "name": name,
        "title": title,
        "local": local,
        "package": name if local else f"llms.{name}",
        "model_mk": (ROOT / "model.mk").read_text(encoding="utf-8"),
        "c": config,
        "config_fields": describe.config_fields(config),
        "qkv": qkv.__name__,
        "qkv_gemv": qkv_gemv.__name__,
        "qkv_steps": "; ".join(steps),
        "qkv_words": f"{' and '.join(traits)} before RoPE" if traits else "Q, K and V with RoPE",
        "attention_words": ("attention heads first" if head_first else "attention")
        if attends_on_device(config)
        else "attention on the host",
        "ffn_words": {"merged": "one ELF", "head_down": "two ELFs", "split": "five ELFs"}[ffn_form(config)],
        "family_words": _family_words(config),
        "speed": "\n".join(describe.speed_table(config)),
        "prefill_table": "\n".join([*table, *prefill]),
        "decode_table": "\n".join([*table, *decode]),
        "partitions": partitions,
        "share": describe.share(config).sentence(),
        "deviations": deviations(config),
        "phases": list(PHASES.items()),
    }


def _family_words(config: ModelConfig) -> str:
    grouped = config.n_heads != config.n_kv_heads
    words = [f"{config.model_type} family", "grouped-query attention" if grouped else "multi-head attention"]
    words += ["QKV bias"] * config.qkv_bias + ["bias of the output projection"] * config.o_bias
    words += ["QK-norm"] * config.qk_norm
    if config.rope_scaling.kind != "default":
        words.append(f"{config.rope_scaling.kind} RoPE scaling by {config.rope_scaling.factor:g}")
    if config.q_dim != config.emb_dim:
        words.append(f"queries {config.q_dim} wide in a model {config.emb_dim} wide")
    text = ", ".join(words)
    return f"{text[:1].upper()}{text[1:]}."


def rendered(context: dict[str, Any]) -> dict[str, str]:
    """Path in the folder -> text; the templates lie as the files do, `NAME` is the model's name."""
    paths = sorted(path.relative_to(TEMPLATES).as_posix() for path in TEMPLATES.rglob("*.j2"))
    return {
        path.removesuffix(".j2").replace("NAME", context["name"]): render(f"{TEMPLATES.name}/{path}", context)
        for path in paths
    }


def render(template: str, context: dict[str, Any]) -> str:
    """Text of a template of this package."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(TEMPLATES.parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )
    return environment.get_template(template).render(context)


def _text(source: str) -> str:
    path = Path(source).expanduser()
    return json.dumps(str(path.resolve()) if path.exists() else source, ensure_ascii=False)


def _record(candidate: Candidate, name: str, source: str) -> str:
    import datetime

    record = {
        "name": name,
        "source": json.loads(_text(source)),
        "content_hash": candidate.checkpoint.content_hash,
        "config": candidate.config.as_dict(),
        "notes": list(candidate.notes),
        "made": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }
    return json.dumps(record, indent=1) + "\n"


def _compile(sequence: KernelSequence, config: ModelConfig) -> None:
    """Compile every program for the twin without keeping it. Raises DeployError with the compiler's words."""
    from llms.llama_kernel_builder.exceptions import CompileFailed, ProgramError
    from llms.llama_kernel_builder.llama_loop import all_programs
    from llms.llama_kernel_builder.toolchains.seam import TwinToolchain

    toolchain = TwinToolchain()
    with tempfile.TemporaryDirectory(prefix="npu-deploy-") as work:
        try:
            for program in all_programs(sequence, config):
                toolchain.compile(program, Path(work) / "program.elf")
        except (CompileFailed, ProgramError) as error:
            raise DeployError(f"the model does not compile: {error}", PRECONDITION) from error
