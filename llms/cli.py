"""`npu-deploy`: the deployment commands. Everything it runs is pytest on a model folder."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Annotated, Optional

import typer

from .models import find_model, model_folders

app = typer.Typer(
    name="npu-deploy",
    help="Deploy Hugging Face LLMs on AMD NPU2, with pytest as the judge.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

LAST_PHASE = 7


def main() -> None:
    """Console entry point."""
    app()


@app.command("list")
def list_models(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the model folders with their checkpoints."""
    models = model_folders()
    if as_json:
        rows = [
            {"name": m.name, "folder": str(m.folder), "choices": m.choices, "default": m.default}
            for m in models
        ]
        typer.echo(json.dumps(rows, indent=1))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "choice", "checkpoint")
    for model in models:
        for key, hf_id in model.choices.items():
            table.add_row(model.name, f"{key} (default)" if key == model.default else key, hf_id)
    Console().print(table)


@app.command()
def run(
    model: Annotated[str, typer.Argument(help="Model folder, see `npu-deploy list`.")],
    first: Annotated[int, typer.Option("--from", min=0, max=LAST_PHASE, help="First phase.")] = 0,
    last: Annotated[int, typer.Option("--to", min=0, max=LAST_PHASE, help="Last phase.")] = LAST_PHASE,
    npu: Annotated[bool, typer.Option("--npu", help="On silicon instead of the digital twin.")] = False,
    checkpoint: Annotated[Optional[Path], typer.Option(help="HF folder or GGUF file to deploy.")] = None,  # noqa: UP045
    choice: Annotated[Optional[str], typer.Option("--model", help="base, instruct, or an HF id.")] = None,  # noqa: UP045
    prompts: Annotated[str, typer.Option(help="Prompts per gate, or `all`.")] = "2",
) -> None:
    """Run the phase gates of a model in order. The exit code is pytest's."""
    if first > last:
        typer.echo(f"error: --from {first} is after --to {last}", err=True)
        raise typer.Exit(2)
    try:
        found = find_model(model)
    except LookupError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    phases = " or ".join(f"phase{number}" for number in range(first, last + 1))
    command = [sys.executable, "-m", "pytest", str(found.tests), "-m", phases, "--npu-prompts", prompts]
    if npu:
        command.append("--npu")
    if checkpoint is not None:
        command += ["--checkpoint", str(checkpoint)]
    if choice is not None:
        command += ["--npu-model", choice]
    raise typer.Exit(subprocess.call(command))


@app.command()
def doctor(
    model: Annotated[Optional[str], typer.Argument(help="Model to check memory and artefacts for.")] = None,  # noqa: UP045
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    npu: Annotated[bool, typer.Option("--npu", help="Exit with 4 unless the NPU is ready.")] = False,
) -> None:
    """Say what this machine has and lacks for NPU work, and what helps. Useful without an NPU, too."""
    from .preflight import command

    text, code = command(model, as_json=as_json, npu=npu)
    typer.echo(text, err=code == 2)
    raise typer.Exit(code)


@app.command()
def clean(model: Annotated[str, typer.Argument(help="Model folder, see `npu-deploy list`.")]) -> None:
    """Remove the compiled artefacts of a model (converted weights stay)."""
    from .session import artefact_folder

    try:
        folder = artefact_folder(find_model(model).name)
    except LookupError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from None
    if folder.is_dir():
        shutil.rmtree(folder)
        typer.echo(f"removed {folder}")
    else:
        typer.echo(f"nothing compiled in {folder}")
