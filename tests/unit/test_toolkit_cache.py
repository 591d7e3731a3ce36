"""KernelCache and host runtime on the twin: results, refusals, artefacts, failing runs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16

from llms.llama_kernel_builder import driver
from llms.llama_kernel_builder.artefacts import ArtefactStore, TornArtefactWarning
from llms.llama_kernel_builder.cache import KernelCache
from llms.llama_kernel_builder.exceptions import (
    ArtefactMissing,
    BadArgument,
    CompileFailed,
    DevicePoisoned,
    KernelRunError,
    UnknownKernel,
)
from llms.llama_kernel_builder.program import Buffer, Program, leaf_program
from llms.llama_kernel_builder.specs import KernelSpec
from llms.llama_kernel_builder.stitch import Part, stitch
from llms.llama_kernel_builder.toolchains.seam import PrebuiltToolchain, TwinToolchain
from npu_twin import injection

N = 1024


def add_program(name: str = "add", tile: int = 128) -> Program:
    """out = a + b with b static."""
    leaf = leaf_program("add", KernelSpec.make("eltwise_add", {"n": N}, "default", {"tile": tile}, (8, 1)))
    buffers = [Buffer("a", (N,)), Buffer("b", (N,), role="static"), Buffer("out", (N,), role="output")]
    return stitch(name, buffers, [Part("add", leaf, {"a": "a", "b": "b", "out": "out"})])


def vector(start: float) -> np.ndarray:
    return (np.arange(N) % 64 + start).astype(bfloat16)


@pytest.fixture
def cache(tmp_path: Path) -> KernelCache:
    made = KernelCache(tmp_path, driver=driver.select("twin"))
    yield made
    made.close()


def test_compile_once_run_many(cache: KernelCache) -> None:
    assert cache.compile_and_cache(add_program()).built
    assert not cache.compile_and_cache(add_program()).built
    first = cache.load_and_run("add", vector(1), vector(2), None)[2]
    second = cache.load_and_run("add", vector(5), None, None)[2]
    np.testing.assert_array_equal(first.astype(np.float32), np.arange(N) % 64 * 2 + 3)
    np.testing.assert_array_equal(second.astype(np.float32), np.arange(N) % 64 * 2 + 7)


def test_results_are_copies(cache: KernelCache) -> None:
    cache.compile_and_cache(add_program())
    first = cache.load_and_run("add", vector(1), vector(0), None)[2]
    before = first.copy()
    cache.load_and_run("add", vector(100), None, None)
    np.testing.assert_array_equal(first, before)


@pytest.mark.parametrize(
    ("array", "text"),
    [
        (np.zeros(N, np.float32), "dtype float32, expected bfloat16"),
        (np.zeros(N - 1, bfloat16), r"shape \(1023,\)"),
        (np.zeros(2 * N, bfloat16)[::2], "not C-contiguous"),
        (np.zeros(N, bfloat16).tolist(), "list is no numpy array"),
        (None, "input argument 'a' is None"),
    ],
)
def test_arrays_it_cannot_take(cache: KernelCache, array: object, text: str) -> None:
    cache.compile_and_cache(add_program())
    with pytest.raises(BadArgument, match=text):
        cache.load_and_run("add", array, vector(0), None)  # type: ignore[arg-type]


def test_wrong_number_of_arguments_and_unknown_kernel(cache: KernelCache) -> None:
    cache.compile_and_cache(add_program())
    with pytest.raises(BadArgument, match="takes 3 arguments, 1 given"):
        cache.load_and_run("add", vector(0))
    with pytest.raises(UnknownKernel, match="'sub' was not compiled into this cache; known: add"):
        cache.load_and_run("sub", vector(0))


def test_changed_static_data_is_refused_and_can_be_released(cache: KernelCache) -> None:
    cache.compile_and_cache(add_program())
    weights = vector(2)
    cache.load_and_run("add", vector(0), weights, None)
    with pytest.raises(BadArgument, match="got other data"):
        cache.load_and_run("add", vector(0), vector(3), None)
    weights[:] = vector(9)
    with pytest.raises(BadArgument, match="got other data"):
        cache.load_and_run("add", vector(0), weights, None)
    cache.release("add")
    out = cache.load_and_run("add", vector(0), vector(3), None)[2]
    assert float(out[0]) == 3.0


def test_buffer_sets_are_separate(cache: KernelCache) -> None:
    cache.compile_and_cache(add_program())
    for layer in (0, 1):
        cache.preload("add", f"add_L{layer}", {"b": vector(10 * layer)})
    outs = [float(cache.run("add", f"add_L{layer}", a=vector(1))["out"][0]) for layer in (0, 1, 0)]
    assert outs == [1.0, 11.0, 1.0]


def test_static_never_given(cache: KernelCache) -> None:
    cache.compile_and_cache(add_program())
    with pytest.raises(BadArgument, match="static argument 'b' was never given"):
        cache.load_and_run("add", vector(0), None, None)
    with pytest.raises(BadArgument, match="static b never preloaded"):
        cache.run("add", "other", a=vector(0))


def test_index_sets_belong_to_the_buffers(cache: KernelCache) -> None:
    cache.compile_and_cache(add_program())
    call = {"output_indices": [2], "intermediate_indices": []}
    cache.load_and_run("add", vector(0), vector(1), None, static_input_indices=[1], **call)
    with pytest.raises(BadArgument, match="differ from the first call"):
        cache.load_and_run("add", vector(0), vector(1), None, static_input_indices=[], **call)
    with pytest.raises(BadArgument, match="index 7 is outside"):
        cache.load_and_run("add", vector(0), vector(1), None, output_indices=[7])


def test_an_activation_listed_as_static_is_not_served_stale(cache: KernelCache) -> None:
    """The old contract kept the first call's values silently; here the second call says so."""
    cache.compile_and_cache(add_program())
    cache.load_and_run("add", vector(1), vector(1), None, static_input_indices=[0, 1])
    with pytest.raises(BadArgument, match="static argument 'a' got other data"):
        cache.load_and_run("add", vector(2), vector(1), None, static_input_indices=[0, 1])


def test_key_covers_tile_and_toolchain(tmp_path: Path) -> None:
    class Other(TwinToolchain):
        identity = "another compiler 7"

    store, other = ArtefactStore(tmp_path, TwinToolchain()), ArtefactStore(tmp_path, Other())
    keys = {store.key(add_program()), store.key(add_program(tile=64)), other.key(add_program())}
    assert len(keys) == 3


@pytest.mark.parametrize("damage", ["truncate", "other program", "no sidecar", "torn sidecar"])
def test_a_damaged_entry_is_built_again(tmp_path: Path, damage: str) -> None:
    store = ArtefactStore(tmp_path, TwinToolchain())
    good = store.get(add_program())
    text = good.path.read_text()
    sidecar = good.path.with_suffix(".json")
    if damage == "truncate":
        good.path.write_text(text[: len(text) // 2])
    elif damage == "other program":
        good.path.write_text(store.get(add_program(tile=64)).path.read_text())
    elif damage == "no sidecar":
        sidecar.unlink()
    else:
        sidecar.write_text(sidecar.read_text()[:10])
    if damage == "no sidecar":
        again = store.get(add_program())
    else:
        with pytest.warns(TornArtefactWarning, match="compiling it again"):
            again = store.get(add_program())
    assert again.built
    assert again.path.read_text() == text


def test_a_killed_build_leaves_nothing(tmp_path: Path) -> None:
    class Killed(TwinToolchain):
        def compile(self, program: Program, destination: Path) -> None:
            destination.write_text("half an artef")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ArtefactStore(tmp_path, Killed()).get(add_program())
    assert list(tmp_path.iterdir()) == []


def test_compiler_diagnosis_names_the_program(tmp_path: Path) -> None:
    bad = leaf_program("bad", KernelSpec.make("eltwise_add", {"n": N}, "default", {"tile": 100}, (8, 1)))
    with pytest.raises(CompileFailed, match="program 'bad' does not compile"):
        ArtefactStore(tmp_path, TwinToolchain()).get(bad)


def test_what_runs_is_what_the_artefact_says(cache: KernelCache) -> None:
    """Take the only launch out of the compiled listing: the output stays unwritten, and that shows."""
    artefact = cache.compile_and_cache(add_program())
    listing = json.loads(artefact.path.read_text())
    listing["launches"] = []
    artefact.path.write_text(json.dumps(listing))
    out = cache.load_and_run("add", vector(1), vector(2), None)[2]
    assert np.isnan(out.astype(np.float32)).all()


@pytest.mark.parametrize("state", ["ERT_CMD_STATE_TIMEOUT", "ERT_CMD_STATE_ERROR", "ERT_CMD_STATE_ABORT"])
def test_every_other_state_is_an_error_and_poisons_the_device(cache: KernelCache, state: str) -> None:
    cache.compile_and_cache(add_program())
    with (
        injection.force_state(state.removeprefix("ERT_CMD_STATE_")),
        pytest.raises(KernelRunError, match=f"kernel 'add' ended in {state} after"),
    ):
        cache.load_and_run("add", vector(1), vector(2), None)
    with pytest.raises(DevicePoisoned, match="unusable since kernel 'add'"):
        cache.load_and_run("add", vector(1), None, None)


def test_more_kernels_than_contexts(cache: KernelCache) -> None:
    names = [f"add{i}" for i in range(2 * cache.runtime.max_contexts)]
    for name in names:
        cache.compile_and_cache(add_program(name))
    for _ in range(2):
        for name in names:
            out = cache.load_and_run(name, vector(1), vector(2), None)[2]
            assert float(out[0]) == 3.0


def test_prebuilt_artefacts_are_served_by_content(tmp_path: Path) -> None:
    program = add_program()
    source = ArtefactStore(tmp_path / "build", TwinToolchain()).get(program).path
    folder = tmp_path / "prebuilt"
    folder.mkdir()
    (folder / "add.elf").write_bytes(source.read_bytes())
    entries = {program.digest: {"name": "add", "file": "add.elf"}}
    (folder / "manifest.json").write_text(json.dumps({"toolchain": "mlir-air test", "entries": entries}))
    toolchain = PrebuiltToolchain(folder)
    assert ArtefactStore(tmp_path / "cache", toolchain).get(program).built
    with pytest.raises(ArtefactMissing, match="no compiled artefact for add"):
        ArtefactStore(tmp_path / "cache", toolchain).get(add_program(tile=64))
    other = add_program(tile=64)
    assert toolchain.lacking((program, other)) == (other,)
    with pytest.raises(ArtefactMissing, match=r"no manifest\.json"):
        PrebuiltToolchain(tmp_path)


def test_npu2_without_pyxrt_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    from llms.llama_kernel_builder.exceptions import DriverUnavailable

    monkeypatch.setattr(driver, "_current", None)
    monkeypatch.setitem(__import__("sys").modules, "pyxrt", None)
    with pytest.raises(DriverUnavailable, match="pyxrt cannot be imported"):
        driver.select("npu2")
    with pytest.raises(ValueError, match="unknown device 'npu9'"):
        driver.select("npu9")
