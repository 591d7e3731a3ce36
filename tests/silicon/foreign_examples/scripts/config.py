"""Global configuration, filled at import."""

import json
import os
from pathlib import Path

FOLDER = os.environ["ALPHA_WEIGHTS"]
RAW = json.loads((Path(FOLDER) / "config.json").read_text())


class Config:
    n_layers = RAW["num_hidden_layers"]
    emb_dim = RAW["hidden_size"]
    n_kv_heads = RAW["num_key_value_heads"]
    head_dim = RAW["head_dim"]
