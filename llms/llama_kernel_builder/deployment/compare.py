"""A model beside the reference model and beside published silicon, every figure with what it is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llms.llama_kernel_builder.deployment import describe

if TYPE_CHECKING:
    from llms.llama_kernel_builder.model_config import ModelConfig

#: The exemplar that published work is compared with.
REFERENCE_MODEL = "llama32_1b"
DEFINITION = (
    "TTFT: from before tokenising to the first token, prompt padded to the compiled length. Time per token: "
    "one decode step in steady state. Set-up is in neither. The published figures have the same definition; "
    "they vary by 10 to 15 % between runs."
)


def comparison(name: str, config: ModelConfig) -> dict[str, Any]:
    """Payload of a record `comparison`: `definition` and `rows` of figures at the published prompt length.

    `config`: the one that the model folder `name` states, not that of a tiny checkpoint; no weights are
    needed. A row has what, device, checkpoint, seq_len, ttft_ms, tpot_ms, source; a figure may be None.
    """
    from llms.verify.contract.deployment import load_adapter
    from llms.verify.contract.models import find_folder

    rows = _rows(name, config)
    if name != REFERENCE_MODEL:
        reference = load_adapter(find_folder(REFERENCE_MODEL)).CONFIG
        rows += _rows(f"{REFERENCE_MODEL}, the reference model", reference)
    return {"definition": DEFINITION, "rows": rows}


def _rows(name: str, config: ModelConfig) -> list[dict[str, Any]]:
    silicon = describe.published(config)
    expected = describe.speed(config, silicon["seq_len"] if silicon else describe.SEQ_LEN)
    errors = f"{expected.ttft_error:.0%} and {expected.tpot_error:.0%}"
    rows = [
        {
            "what": name,
            "device": "twin (modelled)",
            "checkpoint": "configuration only, no weights",
            "seq_len": expected.seq_len,
            "ttft_ms": expected.ttft_ms,
            "tpot_ms": expected.tpot_ms,
            "source": f"predicted, within {errors} where silicon is published",
        }
    ]
    if silicon is not None:
        rows.append(
            {
                "what": name,
                "device": f"{silicon['device']} (measured)",
                "checkpoint": f"{silicon['hf_id']}, {silicon.get('weights', 'bf16')}",
                "seq_len": silicon["seq_len"],
                "ttft_ms": silicon["ttft_s"] * 1e3,
                "tpot_ms": silicon["decode_ms_per_token"],
                "source": f"published {silicon['date']}, Xilinx/mlir-air e972f2942",
            }
        )
    return rows
