"""Fixtures for tests of a model. The modules that they need are imported when one is requested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pytest_npu.core.exceptions import DevicePoisoned, DeviceUnavailable, NotTakingPart
from pytest_npu.core.models import model_name

if TYPE_CHECKING:
    from pytest_npu.core.options import NpuOptions
    from pytest_npu.core.state import NpuState
    from pytest_npu.device.driver import Clock, Device
    from pytest_npu.device.lock import NpuLock

RecordFunction = Callable[[str, Any], None]


def _state(request: pytest.FixtureRequest) -> NpuState:
    from pytest_npu.core.state import state_of

    try:
        return state_of(request.config)
    except NotTakingPart as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture(scope="session")
def npu_device(request: pytest.FixtureRequest) -> Device:
    """The opened device: `name`, `label`, `clock` and whatever the driver adds (`module` is its pyxrt).

    A device that failed earlier in the run fails every later test that wants it, with the first cause.
    """
    try:
        return _state(request).device.open()
    except (DevicePoisoned, DeviceUnavailable) as error:
        pytest.fail(str(error), pytrace=False)


@pytest.fixture
def npu_lock(request: pytest.FixtureRequest) -> Iterator[NpuLock]:
    """The machine-wide NPU lock as a context manager: ``with npu_lock: <work on the device>``.

    Hold it from opening a hardware context to closing it, never during compilation, reference or
    comparison. A lock that a test leaves acquired is released when the test ends. On the twin it costs
    nothing: every process has a device of its own.
    """
    lock = _state(request).make_lock()
    yield lock
    while lock.held:
        lock.release()


@pytest.fixture(scope="session")
def device_clock(npu_device: Device) -> Clock:
    """Clock of the device; `now()` in seconds, modelled on the twin and measured on silicon."""
    return npu_device.clock


@pytest.fixture(scope="session")
def npu_deployments() -> Iterator[dict[Path, Any]]:
    """Deployments that this process has opened, by model folder; their runners are released at the end."""
    opened: dict[Path, Any] = {}
    yield opened
    for one in opened.values():
        release = getattr(one, "release_runners", None)
        if callable(release):
            release()


@pytest.fixture(scope="module")
def model_folder(request: pytest.FixtureRequest) -> Path:
    """The folder of the model that the test belongs to: the nearest one above it with `verify_adapter.py`."""
    folder = _state(request).folders.of(Path(request.path))
    if folder is None:
        raise pytest.UsageError(
            f"the fixture '{request.fixturename}' needs a test below a model folder (one with "
            f"verify_adapter.py); {request.path} is in none"
        )
    return folder


@pytest.fixture(scope="module")
def deployment(
    request: pytest.FixtureRequest,
    npu_device: Device,
    model_folder: Path,
    npu_deployments: dict[Path, Any],
) -> Any:
    """The deployment of the model in whose folder the test is; opened once per process and model."""
    state, folder = _state(request), model_folder
    if folder not in npu_deployments:
        opened = request.config.hook.pytest_npu_open_deployment(
            config=request.config, folder=folder, options=state.options, device=npu_device
        )
        npu_deployments[folder] = opened
        state.emit("deployment", model=model_name(folder), folder=str(folder), **_describe(opened))
    return npu_deployments[folder]


def _describe(opened: Any) -> dict[str, Any]:
    """What a report says about a deployment: checkpoint, variant, configuration."""
    checkpoint = getattr(opened, "checkpoint", None)
    config = getattr(opened, "config", None)
    config = config() if callable(config) else config
    settings = vars(config).items() if hasattr(config, "__dict__") else ()
    return {
        "checkpoint": {
            name: _text(getattr(checkpoint, name, None)) for name in ("label", "kind", "path", "content_hash")
        }
        if checkpoint
        else None,
        "variant": _text(getattr(opened, "model_name", None)),
        "config": {name: value for name, value in settings if isinstance(value, (int, float, str, bool))},
    }


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


@pytest.fixture(scope="module")
def hf_reference(deployment: Any) -> Any:
    """The Hugging Face bf16 reference of the deployment, on the same checkpoint."""
    return deployment.hf_reference()


@pytest.fixture(scope="session")
def npu_options(request: pytest.FixtureRequest) -> NpuOptions:
    """What the user asked for on the command line: number of prompts, tokens, checkpoint, device."""
    return _state(request).options


@pytest.fixture
def npu_record(request: pytest.FixtureRequest) -> RecordFunction:
    """Put a result into the report: ``npu_record(kind, payload)`` with a JSON-able payload.

    Known kinds get a section or a table of their own in the report: `phase0`, `phase1`, `block`,
    `topk_gate`, `ladder`, `teacher_forced`, `limits`, `diagnosis`, `optimisation`, `profile`, `cache_check`
    (rows of layer, head, tensor, cos_min, norm_ratio, or matrices per prompt), `comparison` (definition,
    rows of what, device, checkpoint, seq_len, ttft_ms, tpot_ms, source) and `table` (title, note, columns,
    rows).
    Others are listed as they are. Recorded at once, so it is in the report whatever happens next. Raises
    `pytest_npu.RecordError` naming the entry that JSON cannot carry.
    """
    from pytest_npu.core.events import to_jsonable

    state = _state(request)
    nodeid = request.node.nodeid

    def record(kind: str, payload: Any) -> None:
        info = state.tests.get(nodeid)
        state.emit(
            "record",
            model=info.model if info else model_name(state.folders.of(Path(request.path))),
            nodeid=nodeid,
            kind=kind,
            payload=to_jsonable(payload, kind),
        )

    return record
