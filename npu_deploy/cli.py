"""`npu-deploy`: the deployment commands. Everything it runs is pytest on a model folder."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

if TYPE_CHECKING:
    from npu_deploy.answer import Answer

EPILOG = (
    "Exit codes: 0 done, 1 a gate failed, 2 wrong usage, 3 architecture out of scope, 4 no usable NPU, "
    "5 a phase had nothing to judge by, 6 checkpoint missing, torn or contradictory, 7 precondition not met, "
    "130 interrupted."
)
app = typer.Typer(
    name="npu-deploy",
    help="Deploy Hugging Face LLMs on AMD NPU2, with pytest as the judge.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

LAST_PHASE = 7

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Model = Annotated[str, typer.Argument(help="Model name (see `npu-deploy list`) or path of its folder.")]
# Annotations are read at run time, and Python 3.10 to 3.14 agree on this form of optional options only.
OptPath = Optional[Path]  # noqa: UP045
OptText = Optional[str]  # noqa: UP045
OptInt = Optional[int]  # noqa: UP045


def main() -> None:
    """Console entry point."""
    app()


def _guarded(work: Callable[[], int]) -> None:
    """Run a command; its errors are one line on stderr and an exit code. SIGTERM ends it like Ctrl-C."""
    from npu_deploy.errors import INTERRUPTED, DeployError

    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        code = work()
    except DeployError as error:
        typer.echo(f"error: {error}", err=True)
        code = error.exit_code
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        code = INTERRUPTED
        # An interrupt inside exec() of a string (dataclasses use it while they are imported) leaves a mark,
        # for which CPython ends `python -m` by SIGINT whatever the exit code; the next exec() clears it.
        exec("")
    finally:
        signal.signal(signal.SIGTERM, before)
    raise typer.Exit(code)


def _answered(as_json: bool, work: Callable[[], Answer]) -> None:
    """Print what a command answers and end with its exit code."""

    def shown() -> int:
        answer = work()
        typer.echo(json.dumps(answer.data, indent=1) if as_json else answer.text())
        return answer.exit_code

    _guarded(shown)


@app.command(epilog=EPILOG)
def new(
    source: Annotated[str, typer.Argument(help="HF id, HF folder or GGUF file.", metavar="HF_ID_OR_PATH")],
    name: Annotated[OptText, typer.Option(help="Folder name (default: from the checkpoint's).")] = None,
    target: Annotated[str, typer.Option(help="Device: npu2.")] = "npu2",
    dtype: Annotated[str, typer.Option(help="Number format on the device: bf16.")] = "bf16",
    into: Annotated[
        OptPath,
        typer.Option(help="Parent folder (default: llms/ of a source tree, else the current folder)."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make the folder of a new model: code, gates, kernel rows, documents; no hand edit is needed."""
    from npu_deploy.new import new_model

    _answered(as_json, lambda: new_model(source, name=name, target=target, dtype=dtype, into=into))


@app.command("list", epilog=EPILOG)
def list_models(as_json: AsJson = False) -> None:
    """List the model folders with their checkpoints."""
    from npu_deploy.folders import all_models

    models = all_models()
    if as_json:
        typer.echo(json.dumps([asdict(model) for model in models], indent=1, default=str))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "choice", "checkpoint")
    for model in models:
        for key, hf_id in model.choices.items():
            table.add_row(model.name, f"{key} (default)" if key == model.default else key, hf_id)
    Console().print(table)


@app.command(epilog=EPILOG)
def run(
    model: Annotated[OptText, typer.Argument(help="Model name or path of its folder.")] = None,
    first: Annotated[int, typer.Option("--from", min=0, max=LAST_PHASE, help="First phase.")] = 0,
    last: Annotated[
        OptInt,
        typer.Option("--to", min=0, max=LAST_PHASE, help="Last phase (default: the last that has tests)."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every model of `npu-deploy list`.")] = False,
    npu: Annotated[bool, typer.Option("--npu", help="On silicon instead of the digital twin.")] = False,
    checkpoint: Annotated[OptPath, typer.Option(help="HF folder or GGUF file to deploy.")] = None,
    choice: Annotated[OptText, typer.Option("--model", help="A key of MODEL_CHOICES, or an HF id.")] = None,
    prompts: Annotated[str, typer.Option(help="Prompts per gate, or `all`.")] = "2",
    force: Annotated[
        bool, typer.Option("--force", help="Start at --from without a PASS of the phase before it.")
    ] = False,
    update_docs: Annotated[
        Optional[bool],  # noqa: UP045
        typer.Option(
            "--update-docs/--no-update-docs",
            help="Keep TODO.md of the model's folder up to date (default: only where `new` made the folder); "
            "results go to reports/<model>/ in any case.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run the phase gates of a model in order and stop at the first that is not PASS."""
    from npu_deploy.run import RunRequest, run_all, run_model

    request = RunRequest(
        first, last, npu, checkpoint, choice, prompts, force=force, update_docs=update_docs, quiet=as_json
    )
    _answered(as_json, lambda: run_all(request) if every else run_model(model, request))


@app.command(epilog=EPILOG)
def status(
    model: Annotated[OptText, typer.Argument(help="Model; without it all.")] = None, as_json: AsJson = False
) -> None:
    """Show the ledger: the last verdict of every phase, and whether it still holds."""
    from npu_deploy.status import status_of

    _answered(as_json, lambda: status_of(model))


@app.command(epilog=EPILOG)
def predict(
    source: Annotated[
        str, typer.Argument(help="config.json, HF folder, HF id or model.", metavar="HF_CONFIG")
    ],
    seq_len: Annotated[int, typer.Option(min=1, help="Prompt length in tokens.")] = 2048,
    as_json: AsJson = False,
) -> None:
    """Predict TTFT and tokens/s from a configuration alone; needs no weights."""
    from npu_deploy.predict import predict_source

    _answered(as_json, lambda: predict_source(source, seq_len))


@app.command(epilog=EPILOG)
def promote(as_json: AsJson = False) -> None:
    """List kernels and blocks that two or more models keep to themselves: candidates for the toolkit."""
    from npu_deploy.promote import candidates

    _answered(as_json, candidates)


@app.command(epilog=EPILOG)
def bisect(
    model: Model,
    prompt: Annotated[OptText, typer.Option(help="Prompt (default: the first of the model's set).")] = None,
    path: Annotated[OptText, typer.Option(help="prefill or decode (default: both).")] = None,
    steps: Annotated[int, typer.Option(min=1, max=64, help="Decode steps to look at.")] = 12,
    npu: Annotated[bool, typer.Option("--npu", help="On silicon instead of the digital twin.")] = False,
    checkpoint: Annotated[OptPath, typer.Option(help="HF folder or GGUF file to deploy.")] = None,
    choice: Annotated[OptText, typer.Option("--model", help="A key of MODEL_CHOICES, or an HF id.")] = None,
    fault: Annotated[
        OptText, typer.Option(help="Plant a fault first (`python -m npu_twin.faults list`).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compare every launch with its fp32 reference and name the first that is wrong; exit code 1 if any."""
    from npu_deploy.bisect import BisectRequest, bisect_model

    request = BisectRequest(model, prompt, path, steps, npu, checkpoint, choice, fault)
    _answered(as_json, lambda: bisect_model(request))


@app.command()
def doctor(
    model: Annotated[OptText, typer.Argument(help="Model to check memory and artefacts for.")] = None,
    as_json: AsJson = False,
    npu: Annotated[bool, typer.Option("--npu", help="Exit with 4 unless the NPU is ready.")] = False,
) -> None:
    """Say what this machine has and lacks for NPU work, and what helps. Useful without an NPU, too."""
    from pytest_npu.device.preflight import command

    text, code = command(model, as_json=as_json, npu=npu)
    typer.echo(text, err=code == 2)
    raise typer.Exit(code)


@app.command(epilog=EPILOG)
def clean(model: Model) -> None:
    """Remove the compiled artefacts of a model (converted weights stay)."""
    import shutil

    from llms.llama_kernel_builder.deployment.session import artefact_folder
    from npu_deploy.folders import find

    def work() -> int:
        folder = artefact_folder(find(model).name)
        if folder.is_dir():
            shutil.rmtree(folder)
            typer.echo(f"removed {folder}")
        else:
            typer.echo(f"nothing compiled in {folder}")
        return 0

    _guarded(work)
