"""Settings under which a run must have the same bits: environment variables read when a process starts."""

from __future__ import annotations

from collections.abc import Mapping

_NUMPY = "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR AVX2 FMA3 X86_V3 X86_V4"

SETTINGS: Mapping[str, Mapping[str, str]] = {
    "highest": {"OMP_NUM_THREADS": "4"},
    "plain": {},
    "one thread": {"OMP_NUM_THREADS": "1"},
    "two threads": {"OMP_NUM_THREADS": "2"},
    **{
        f"oneDNN {isa}": {"ONEDNN_MAX_CPU_ISA": isa}
        for isa in ("SSE41", "AVX2", "AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16", "AVX512_CORE_AMX")
    },
    **{f"ATen {isa}": {"ATEN_CPU_CAPABILITY": isa} for isa in ("default", "avx2", "avx512")},
    **{f"MKL {isa}": {"MKL_ENABLE_INSTRUCTIONS": isa} for isa in ("SSE4_2", "AVX2", "AVX512")},
    **{f"OpenBLAS {core}": {"OPENBLAS_CORETYPE": core} for core in ("Nehalem", "Haswell", "SkylakeX")},
    "numpy without AVX": {"NPY_DISABLE_CPU_FEATURES": _NUMPY},
    "kernels baseline": {"NPU_KERNEL_ISA": "baseline", "NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": ""},
    "kernels AVX2": {"NPU_KERNEL_ISA": "avx2", "NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": ""},
    "lowest": {
        "ONEDNN_MAX_CPU_ISA": "SSE41",
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "OPENBLAS_CORETYPE": "Nehalem",
        "NPY_DISABLE_CPU_FEATURES": _NUMPY,
        "NPU_KERNEL_ISA": "baseline",
        "NUMBA_CPU_NAME": "x86-64",
        "NUMBA_CPU_FEATURES": "",
        "OMP_NUM_THREADS": "1",
    },
}
"""``lowest`` is every library at its least with one thread, ``highest`` everything that the CPU has."""


def environment(setting: str, base: Mapping[str, str]) -> dict[str, str]:
    """``base`` without any variable that a setting uses, and with those of ``setting``.

    OpenMP threads sleep while they wait: four on two CPUs would spin in each other's way for minutes.
    """
    ours = {name for values in SETTINGS.values() for name in values}
    return {
        "OMP_WAIT_POLICY": "PASSIVE",
        **{name: value for name, value in base.items() if name not in ours},
        **SETTINGS[setting],
    }
