"""What the `verify_adapter.py` of our models has in common: the deployment contract over a Session."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_registry.registry_lookup import ENV
from llms.checkpoints import Checkpoint, PackagedGGUF, resolve
from llms.llama_kernel_builder.bench import ModelBench
from llms.llama_kernel_builder.deployment.runner import ProductionRunner
from llms.llama_kernel_builder.deployment.session import InferenceModule, Session
from llms.llama_kernel_builder.exceptions import ConfigError
from llms.llama_kernel_builder.model_config import SIZES, ModelConfig
from llms.verify.contract.abilities.artefacts import ArtefactList, ArtefactRequest


@dataclass(frozen=True)
class CheckpointSource:
    """Where the checkpoints of a model come from: choices (key -> HF id), packaged files, tiny checkpoint.

    The tiny checkpoint stands in for the default choice only: a variant that somebody asked for and that
    cannot be had is an error.
    """

    choices: Mapping[str, str]
    default: str
    packaged: Mapping[str, PackagedGGUF] = field(default_factory=dict)
    tiny: Path | None = None

    def resolve_model(self, choice: str) -> str:
        """A key of the choices -> HF id; anything else (an id or a path) passes through."""
        return self.choices.get(choice, choice)

    def checkpoint(self, model_name: str) -> Checkpoint:
        """Resolve an HF id, an HF folder or a GGUF file. Raises CheckpointError naming file and remedy."""
        path = Path(model_name).expanduser()
        explicit = path if path.exists() or model_name.startswith((".", "/", "~")) else None
        tiny = self.tiny if model_name == self.choices[self.default] else None
        return resolve(model_name, explicit=explicit, packaged=self.packaged.get(model_name), tiny=tiny)


class ModelAdapter:
    """The functions of the deployment contract for one of our models."""

    def __init__(self, inference: InferenceModule, source: CheckpointSource, config: ModelConfig) -> None:
        self.inference = inference
        self.source = source
        self.config = config
        self._chosen_folder: Path | None = None

    def resolve_model(self, choice: str) -> str:
        """A key of the choices -> HF id; anything else (an id or a path) passes through.

        A path that exists is kept for `build_config()`: the deployment contract passes it no model.
        """
        path = Path(choice).expanduser()
        self._chosen_folder = path if choice not in self.source.choices and path.exists() else None
        return self.source.resolve_model(choice)

    def hf_reference(self, name: str) -> str:
        """The reference runs on the very checkpoint that is deployed."""
        return name

    def build_config(self, model_name: str | None = None) -> ModelConfig:
        """The configuration of a checkpoint.

        Without one, that of the path which `resolve_model` was given last; after a key or an HF id, that of
        the published model.
        """
        if model_name is None and self._chosen_folder is None:
            return self.config
        model_name = model_name or str(self._chosen_folder)
        return ModelConfig.from_hf_folder(self.source.checkpoint(model_name).path)

    def build_runner(
        self,
        model_name: str,
        config: ModelConfig,
        max_seq: int,
        tokenizer: Any,
        *,
        npu_attn: bool = True,
        lite_mode: bool = False,
    ) -> ProductionRunner:
        """Load weights and prepare the runtime; kernels are compiled for the lengths that are used.

        Raises ConfigError when the published configuration was given for a checkpoint of other shapes.
        """
        checkpoint = self.source.checkpoint(model_name)
        if config == self.config:
            _same_shapes(config, checkpoint)
        session = Session(self.inference, checkpoint, tokenizer, max_seq, config=config, npu_attn=npu_attn)
        return ProductionRunner(model_name, session, lite_mode=lite_mode, published=self.config)

    def kernel_bench(self, folder: Path | None = None) -> ModelBench:
        """Single kernels of the configuration in an HF folder, or of the published one; needs no weights."""
        config = self.config if folder is None else ModelConfig.from_hf_folder(folder)
        return ModelBench(self.inference.MODEL, self.inference.SEQUENCE, config)

    def needed_artefacts(self, request: ArtefactRequest) -> ArtefactList | None:
        """What has to be compiled before a run on silicon; None when it is compiled on demand."""
        from llms.llama_kernel_builder.deployment.artefact_list import needed_artefacts

        return needed_artefacts(self.inference, request.config or self.config, request)


def _same_shapes(config: ModelConfig, checkpoint: Checkpoint) -> None:
    own = ModelConfig.from_hf_folder(checkpoint.path)
    differing = [name for name in SIZES if getattr(config, name) != getattr(own, name)]
    if differing:
        text = ", ".join(
            f"{name} {getattr(own, name)} instead of {getattr(config, name)}" for name in differing
        )
        raise ConfigError(
            f"{checkpoint.label} in {checkpoint.path} has {text}: build_config() without an argument is the "
            "published model unless resolve_model was given a path. Give it the model's name, or name the "
            "runner pytest_npu.deployed.<model>, "
            "whose build_config() is that of the checkpoint that runs"
        )


def use_registry(folder: Path) -> None:
    """Let lookups find the kernel rows that a model's folder carries; also in processes started from here."""
    known = [path for path in os.environ.get(ENV, "").split(os.pathsep) if path]
    if str(folder) not in known:
        os.environ[ENV] = os.pathsep.join([*known, str(folder)])
