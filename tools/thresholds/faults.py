"""The faults that limits are measured against: of the catalogue, those that change numbers of a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from llms.llama_kernel_builder.model_config import ModelConfig
from npu_twin import faults

NAMES = (
    "rope_theta_tenth",
    "rope_theta_hundredfold",
    "rope_interleaved",
    "rope_one_late",
    "gqa_tiled",
    "decode_slot_late",
    "decode_position_late",
    "open_tail",
    "attention_hole",
    "first_slot_hidden",
    "query_louder",
    "no_causal_mask",
    "norm_plus_one",
    "layer_skipped",
    "gate_up_swapped",
    "neighbour_weight",
    "final_norm_5_percent",
    "bias_dropped",
    "nan_at_step_3",
    "rare_bad_tile",
    "decode_norm_bf16_sum",
    "eps_1e-5_for_1e-6",
    "eps_1e-6_for_1e-5",
    "results_are_views",
    "kv_layout_swapped",
    "kv_slot_clobbered",
    "down_low_precision",
)


@dataclass(frozen=True)
class ModelFault:
    """A fault: its name, what it is, a context manager that plants it, and where it applies."""

    name: str
    what: str
    plant: Callable[[ModelConfig], AbstractContextManager[Any]]
    applies: Callable[[ModelConfig], bool] = lambda config: True


@dataclass(frozen=True)
class _Configured:
    """What predicates of the catalogue ask of a deployment."""

    built: ModelConfig

    def config(self) -> ModelConfig:
        """The configuration."""
        return self.built


def _from_catalogue(name: str) -> ModelFault:
    found = faults.find(name)
    return ModelFault(
        name,
        found.what,
        lambda config: found.plant(),
        lambda config: found.applies(_Configured(config)),
    )


FAULTS: tuple[ModelFault, ...] = tuple(_from_catalogue(name) for name in NAMES)
"""All faults, in the order of the report."""


def fault(name: str) -> ModelFault:
    """Return one fault; raises KeyError naming the known ones."""
    for one in FAULTS:
        if one.name == name:
            return one
    raise KeyError(f"no fault {name!r}; known: {', '.join(NAMES)}")
