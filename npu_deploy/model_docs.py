"""Documents of the models of this package, from the same templates as those of a new model.

    python -m npu_deploy.model_docs [MODEL ...]

README.md, ARCHITECTURE.md, Makefile and .gitignore are rendered anew (predicted figures change with the
timing parameters of the twin; a test holds the committed files against this). What people write in (TODO.md,
LESSONS.md) is only made where it is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from llms.verify.contract.models import ModelFolder, model_folders
from npu_deploy import scaffold

RENDERED = ("README.md", "ARCHITECTURE.md", "Makefile", ".gitignore")
WRITTEN = ("TODO.md", "LESSONS.md")
TITLES = {
    "llama32_1b": "Llama-3.2-1B",
    "qwen2": "Qwen2.5",
    "qwen3_0_6b": "Qwen3-0.6B",
    "smollm2_135m": "SmolLM2-135M",
}


def texts(model: ModelFolder, only: tuple[str, ...] = RENDERED) -> dict[str, str]:
    """Path in the model's folder -> text. The configuration is the adapter's, that of the published model."""
    from llms.verify.contract.deployment import load_adapter

    config = load_adapter(model.folder).CONFIG
    context = scaffold.context_of(config, model.name, TITLES.get(model.name, model.name), local=False)
    default = model.choices[model.default]
    others = sorted({hf_id for hf_id in model.choices.values() if hf_id != default})
    words = f"`{default}`" + (f"; also {', '.join(f'`{hf_id}`' for hf_id in others)}" if others else "")
    context |= {"choice": model.default, "source": f'"{default}"', "checkpoint_words": words}
    return {path: text for path, text in scaffold.rendered(context).items() if path in only}


def refresh(model: ModelFolder) -> list[Path]:
    """Write what differs; returns the paths that were written."""
    from llms.checkpoints import write_atomically

    written = []
    for path, text in texts(model, RENDERED + WRITTEN).items():
        target = model.folder / path
        if target.is_file() and (path in WRITTEN or target.read_text(encoding="utf-8") == text):
            continue
        write_atomically(target, text.encode())
        target.chmod(0o644)
        written.append(target)
    return written


def main(names: Sequence[str]) -> int:
    """Refresh the named models of the package, or all of them."""
    for model in model_folders():
        if not names or model.name in names:
            for path in refresh(model):
                print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
