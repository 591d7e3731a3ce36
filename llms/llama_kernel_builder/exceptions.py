"""Errors of the kernel toolkit and the host runtime.

ToolkitError
├── ProgramError          a kernel spec, program or stitch map that makes no sense
├── ConfigError           a model configuration that is out of scope or contradicts itself
├── CompileFailed         a toolchain refused a program
├── ArtefactMissing       no compiled artefact for a program (silicon without a build)
├── DriverUnavailable     pyxrt, device or permission missing
├── BadArgument           wrong dtype, shape, contiguity or index into a kernel call
├── UnknownKernel         a kernel name that was never compiled into this cache
├── SequenceTooLong       a prompt past the largest prefill bucket, a decode step past the KV cache
└── KernelRunError        a run that did not end in ERT_CMD_STATE_COMPLETED
    └── DevicePoisoned    the device failed earlier in this process; nothing it says can be trusted
"""

from __future__ import annotations


class ToolkitError(Exception):
    """Base of every error of the toolkit."""


class ProgramError(ToolkitError):
    """A kernel spec, program or stitch map is incomplete or contradicts itself."""


class ConfigError(ToolkitError):
    """A model configuration is out of scope, incomplete or contradicts itself."""


class CompileFailed(ToolkitError):
    """A toolchain refused a program; the text is the toolchain's own diagnosis."""

    def __init__(self, program: str, diagnosis: str) -> None:
        self.program = program
        self.diagnosis = diagnosis
        super().__init__(f"program '{program}' does not compile: {diagnosis}")


class ArtefactMissing(ToolkitError):
    """Compiled artefacts are missing and this toolchain cannot build them."""

    def __init__(self, programs: tuple[str, ...], where: str) -> None:
        self.programs = programs
        super().__init__(
            f"no compiled artefact for {', '.join(programs)} in {where}; "
            "build them with the mlir-air toolchain and list them in manifest.json"
        )


class DriverUnavailable(ToolkitError):
    """The device behind a driver cannot be opened."""

    def __init__(self, reason: str, remedy: str) -> None:
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{reason}. {remedy}")


class BadArgument(ToolkitError):
    """A kernel call was given an array it cannot take."""


class UnknownKernel(ToolkitError):
    """A kernel name that is not in this cache."""


class SequenceTooLong(ToolkitError):
    """A prompt does not fit the largest prefill bucket, or a position does not fit the KV cache."""


class KernelRunError(ToolkitError):
    """A kernel run ended in a state other than COMPLETED.

    Attributes: `kernel` (name), `state` (ert_cmd_state name), `elapsed_ms` (device clock).
    """

    def __init__(self, kernel: str, state: str, elapsed_ms: float, cause: str) -> None:
        self.kernel = kernel
        self.state = state
        self.elapsed_ms = elapsed_ms
        self.cause = cause
        super().__init__(f"kernel '{kernel}' ended in {state} after {elapsed_ms:.1f} ms: {cause}")


class DevicePoisoned(KernelRunError):
    """An earlier failure left the device in an unknown state; the first cause is repeated."""
