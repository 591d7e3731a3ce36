"""What other packages add to the twin and to the kernel registry: entry points, by group and name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from typing import Any

REFERENCES = "npu_kernel_references"
"""Group of modules with plain fp32 references, inputs, metrics and tolerances of the kernels."""

MODEL_CONFIG = "npu_model_config"
"""Group of readers of model configurations: what a config.json says, by the toolkit's names of sizes."""


class ExtensionMissing(LookupError):
    """No installed package offers an entry point, or it cannot be loaded. The message says how to get it."""


@lru_cache
def extension(group: str, name: str) -> Any:
    """Load what an installed package offers as entry point `name` of `group`. Raises ExtensionMissing."""
    offers = tuple(metadata.entry_points(group=group, name=name))
    if not offers:
        raise ExtensionMissing(
            f"no installed package offers '{name}' of the entry-point group {group}; pytest-npu does: "
            "pip install pytest-npu (in a clone: pip install -e . once more)"
        )
    try:
        return offers[0].load()
    except (ImportError, AttributeError) as error:
        raise ExtensionMissing(
            f"entry point '{name}' of {group} ({offers[0].value}) cannot be loaded: {error}; install its "
            "package with all its dependencies"
        ) from error


def kernel_references() -> Any:
    """The module that says what a kernel must compute: `make_inputs`, `reference_output`, `compare`,
    `offenders`, `tolerance`. It shares no code with the twin. Raises ExtensionMissing.
    """
    return extension(REFERENCES, "fp32")


def model_config(fields: Mapping[str, Any]) -> Any:
    """What the fields of a Hugging Face config.json say: an object with `n_layers`, `emb_dim`, `n_heads`,
    `n_kv_heads`, `head_dim`, `hidden_dim`, `vocab_size`, `qkv_bias` and `qk_norm`. Raises ExtensionMissing,
    and what the reader raises for a configuration out of its scope.
    """
    return extension(MODEL_CONFIG, "hugging_face")(fields)
