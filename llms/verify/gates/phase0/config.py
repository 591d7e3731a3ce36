"""Phase 0, configuration: every field an adapter built against the raw config.json, in both forms.

transformers 4 writes `rope_theta`, `rope_scaling` and `torch_dtype`, transformers 5 `rope_parameters` and
`dtype`. A reader that knows one form only takes a default for the other and nobody notices, so the adapter is
given the same file in both forms.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from llms.verify.contract.deployment import Deployment, takes_model_name
from llms.verify.reference.hf_facts import expected_tensors, hf_config

_SAME = {
    "model_type": "model_type",
    "n_layers": "num_hidden_layers",
    "emb_dim": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "rms_eps": "rms_norm_eps",
    "tied_embeddings": "tie_word_embeddings",
    "max_position": "max_position_embeddings",
}
_SCALING = {
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position": "original_max_position_embeddings",
}
_USED = {"default": (), "linear": ("factor",), "llama3": tuple(_SCALING)}
_NUMBERS = {"rope_theta", "rms_eps"}


def config_read_back(deployment: Deployment) -> tuple[list[str], list[str], dict[str, Any]]:
    """Compare; returns (problems, notes, payload)."""
    folder = deployment.checkpoint.path
    stated = stated_fields(folder)
    built = deployment.config()
    problems, rows = compare(stated, built)
    notes = []
    forms: dict[str, Any] = {}
    try:
        for form in ("v4", "v5"):
            other = _built_from(deployment, folder, form)
            if other is None:
                notes.append("not offered: build_config takes no model name, so only one form can be read")
                break
            wrong, _ = compare(stated, other)
            problems += [f"transformers {form[1]} form of config.json: {text}" for text in wrong]
            forms[form] = not wrong
    except Exception as error:  # whatever the adapter raises
        problems.append(f"the same configuration in another form cannot be read: {error}")
    return problems, notes, {"fields": rows, "forms": forms}


def stated_fields(folder: Path) -> dict[str, Any]:
    """Field name of a deployment -> value of config.json; what it leaves out is transformers' own default."""
    raw = read_json(folder / "config.json")
    hf = hf_config(folder)
    fields: dict[str, Any] = {}
    for mine, theirs in _SAME.items():
        value = raw.get(theirs)
        if value is None and theirs == "head_dim":
            value = raw["hidden_size"] // raw["num_attention_heads"]
        fields[mine] = getattr(hf, theirs) if value is None else value
    new, old = raw.get("rope_parameters") or {}, raw.get("rope_scaling") or {}
    scaling = {**old, **new}
    theta = new.get("rope_theta", raw.get("rope_theta"))
    fields["rope_theta"] = (hf.rope_parameters or {}).get("rope_theta") if theta is None else theta
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    fields["rope_scaling"] = {"kind": kind, **{mine: scaling.get(_SCALING[mine]) for mine in _USED[kind]}}
    tensors = expected_tensors(folder)
    fields["qkv_bias"] = "model.layers.0.self_attn.k_proj.bias" in tensors
    fields["o_bias"] = "model.layers.0.self_attn.o_proj.bias" in tensors
    fields["qk_norm"] = "model.layers.0.self_attn.k_norm.weight" in tensors
    ends: list[int] = []
    generation = read_json(folder / "generation_config.json")
    for value in (raw.get("eos_token_id"), generation.get("eos_token_id")):
        ends += value if isinstance(value, list) else [] if value is None else [value]
    fields["eos_token_ids"] = sorted(set(ends)) if ends else None
    return fields


def compare(stated: Mapping[str, Any], built: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """Problems, and one row per field: name, stated, built, ok. A field nobody states is a problem."""
    values = asdict(built) if is_dataclass(built) and not isinstance(built, type) else dict(vars(built))
    problems, rows = [], []
    for name, value in values.items():
        if name not in stated:
            problems.append(f"field {name} = {value!r} of the built configuration is held against nothing")
            continue
        wanted = stated[name]
        ok = _equal(name, wanted, value)
        if not ok:
            problems.append(f"{name} is {value!r}, config.json says {wanted!r}")
        rows.append({"name": name, "stated": wanted, "built": value, "ok": ok})
    return problems, rows


def _equal(name: str, wanted: Any, value: Any) -> bool:
    if name == "eos_token_ids":
        return wanted is None or sorted(set(value)) == wanted
    if name == "rope_scaling":
        given = value if isinstance(value, Mapping) else {"kind": value}
        return all(given.get(key) == item for key, item in wanted.items())
    if name in _NUMBERS:
        return bool(float(value) == float(wanted))
    return bool(value == wanted) and isinstance(value, bool) == isinstance(wanted, bool)


def to_v4(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The form of transformers 4 of a config.json."""
    data = dict(raw)
    rope = dict(data.pop("rope_parameters", None) or {})
    if "rope_theta" in rope:
        data["rope_theta"] = rope.pop("rope_theta")
    if rope.get("rope_type", "default") != "default":
        data["rope_scaling"] = rope
    if "dtype" in data:
        data["torch_dtype"] = data.pop("dtype")
    return data


def to_v5(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The form of transformers 5 of a config.json."""
    data = dict(raw)
    if data.get("rope_parameters") is None:
        rope = dict(data.pop("rope_scaling", None) or {})
        rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))
        if "rope_theta" in data:
            rope["rope_theta"] = data.pop("rope_theta")
        data["rope_parameters"] = rope
    if "torch_dtype" in data:
        data["dtype"] = data.pop("torch_dtype")
    return data


def _built_from(deployment: Deployment, folder: Path, form: str) -> Any:
    """What the adapter builds from the folder with config.json in a form; None: it takes no model name."""
    build = deployment.adapter.build_config
    if not takes_model_name(build):
        return None
    raw = read_json(folder / "config.json")
    with tempfile.TemporaryDirectory(prefix="config-form-") as name:
        copy = Path(name)
        for path in folder.resolve().iterdir():
            if path.name != "config.json":
                (copy / path.name).symlink_to(path)
        data = to_v4(raw) if form == "v4" else to_v5(raw)
        (copy / "config.json").write_text(json.dumps(data), encoding="utf-8")
        return build(str(copy))


def read_json(path: Path) -> dict[str, Any]:
    """Content of a file of a checkpoint, empty when it has none."""
    if not path.is_file():
        return {}
    data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return data
