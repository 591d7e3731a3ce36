"""Errors of the kernel toolkit and the host runtime.

ToolkitError
├── ProgramError          a kernel spec, program or stitch map that makes no sense
├── ConfigError           a model configuration that is incomplete or contradicts itself
│   └── OutOfScope        an architecture that is not deployed here
├── CompileFailed         a toolchain refused a program
├── ArtefactMissing       no compiled artefact for a program (silicon without a build)
├── DriverUnavailable     pyxrt, device or permission missing
├── ArtefactRefused       the driver does not take a compiled artefact, or finds no kernel of that name in it
├── ContextRefused        the driver opens no further hardware context
├── DeviceMemoryError     a buffer object cannot be allocated
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
    """A model configuration is incomplete or contradicts itself."""


class OutOfScope(ConfigError):
    """The architecture is none of those that are deployed here; one sentence says which part of it."""


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
            "build them with the mlir-air toolchain and list them in its manifest.json, or name another "
            "folder with $NPU_ARTEFACTS"
        )


class DriverUnavailable(ToolkitError):
    """The device behind a driver cannot be opened."""

    def __init__(self, reason: str, remedy: str) -> None:
        self.reason = reason
        self.remedy = remedy
        super().__init__(f"{reason}. {remedy}")


class ArtefactRefused(ToolkitError):
    """The driver refuses an artefact; `program` and `path` name it, the message has the driver's text."""

    def __init__(self, program: str, path: str, kernel: str, text: str) -> None:
        self.program = program
        self.path = path
        super().__init__(
            f"program '{program}': the driver refuses {path} (kernel '{kernel}'): {text.strip()}. It must "
            "be built for this NPU generation, and manifest.json must name its kernel (mlir-air: "
            "main:<function>)"
        )


class ContextRefused(ToolkitError):
    """The driver opens no hardware context, although this process has closed all of its own."""

    def __init__(self, program: str, text: str) -> None:
        self.program = program
        super().__init__(
            f"program '{program}': the driver refuses a hardware context ({text.strip()}). This process "
            "holds no other one, so another process has them: `npu-deploy doctor` lists who holds the device"
        )


class DeviceMemoryError(ToolkitError):
    """A buffer object of `nbytes` cannot be allocated."""

    def __init__(self, nbytes: int, text: str) -> None:
        self.nbytes = nbytes
        super().__init__(
            f"a buffer of {nbytes} bytes cannot be allocated on the device: {text.strip()}. Buffers are "
            "pinned host memory: check the memlock limit (`npu-deploy doctor`) and the free memory"
        )


class BadArgument(ToolkitError):
    """A kernel call was given an array it cannot take."""


class UnknownKernel(ToolkitError):
    """A kernel name that is not in this cache."""


class SequenceTooLong(ToolkitError):
    """A prompt does not fit the largest prefill bucket, or a position does not fit the KV cache."""


class KernelRunError(ToolkitError):
    """A kernel run ended in a state other than COMPLETED.

    Attributes: `kernel` (name), `state` (ert_cmd_state name, or what the driver refused), `elapsed_ms`
    (device clock), `cause` (the likely one).
    """

    def __init__(self, kernel: str, state: str, elapsed_ms: float, cause: str) -> None:
        self.kernel = kernel
        self.state = state
        self.elapsed_ms = elapsed_ms
        self.cause = cause
        super().__init__(f"kernel '{kernel}' ended in {state} after {elapsed_ms:.1f} ms: {cause}")


class DevicePoisoned(KernelRunError):
    """An earlier failure left the device in an unknown state; the first cause is repeated."""
