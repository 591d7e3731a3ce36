"""From a description of kernels to machine code for this CPU, once per process.

LLVM compiles for the CPU it runs on; ``NPU_KERNEL_ISA`` asks for less (``baseline``, ``avx2``, ``avx512``),
which changes the time and not one bit: that is what the variable is for, a proof on one machine.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

ISA_ENV = "NPU_KERNEL_ISA"

_X86 = {
    "baseline": ("x86-64", 4, ""),
    "avx2": ("haswell", 8, ""),
    "avx512": ("skylake-avx512", 16, "-prefer-256-bit"),
}


class KernelIsaError(ValueError):
    """``NPU_KERNEL_ISA`` names an instruction set that does not exist or that this CPU lacks."""


@dataclass(frozen=True)
class Isa:
    """What kernels are compiled for.

    Attributes:
        name: as reports show it.
        cpu, features: as LLVM takes them.
        lanes: f32 lanes of one vector register, by which tiles are chosen; no result depends on it.
        registers: vector registers.
    """

    name: str
    cpu: str
    features: str
    lanes: int
    registers: int


@lru_cache(maxsize=1)
def isa() -> Isa:
    """Return the instruction set that kernels of this process are compiled for.

    Raises:
        KernelIsaError: ``NPU_KERNEL_ISA`` cannot be met here.
    """
    import llvmlite.binding as llvm

    asked = os.environ.get(ISA_ENV, "")
    has = llvm.get_host_cpu_features()
    if platform.machine() not in ("x86_64", "AMD64"):
        if asked not in ("", "baseline"):
            raise KernelIsaError(f"{ISA_ENV}={asked} is for x86-64; this is {platform.machine()}: unset it")
        return Isa(platform.machine(), llvm.get_host_cpu_name(), has.flatten(), 4, 32)
    offered = ["baseline"]
    if has.get("avx2") and has.get("fma"):
        offered.append("avx2")
        if all(has.get(name) for name in ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd")):
            offered.append("avx512")
    if asked and asked not in offered:
        raise KernelIsaError(f"{ISA_ENV}={asked}: this CPU offers {', '.join(offered)}")
    name = asked or offered[-1]
    cpu, lanes, features = _X86[name]
    return Isa(name, cpu, features, lanes, 32 if name == "avx512" else 16)


class Library:
    """Machine code of one module; ``address[name]`` is that of a function."""

    def __init__(self, text: str, names: tuple[str, ...]) -> None:
        import llvmlite.binding as llvm

        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple()
        now = isa()
        machine = target.create_target_machine(cpu=now.cpu, features=now.features, opt=3, jit=True)
        module = llvm.parse_assembly(text)
        module.triple = llvm.get_default_triple()
        module.data_layout = str(machine.target_data)
        options = llvm.create_pipeline_tuning_options(speed_level=2)
        # Vectors are written out; the passes that would look for more cost time only.
        options.loop_vectorization = options.slp_vectorization = False
        builder = llvm.create_pass_builder(machine, options)
        builder.getModulePassManager().run(module, builder)
        self._engine = llvm.create_mcjit_compiler(module, machine)
        self._engine.finalize_object()
        self.assembly: Callable[[], str] = lambda: str(machine.emit_assembly(module))
        self.address: Mapping[str, int] = {
            name: self._engine.get_function_address(name) for name in names if name != "tile"
        }


def build(*emitters: Callable[[Any], str]) -> Library:
    """Compile what the emitters put into one module; each returns the name of its function."""
    from llvmlite import ir

    module = ir.Module(name="fixed_order")
    names = tuple(emit(module) for emit in emitters)
    return Library(str(module), names)
