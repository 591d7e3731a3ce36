"""Bisect by halves: the layer, then the kernel in it, with few runs of the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from llms.verify.localise.swap import fewest, halves

KERNELS = [f"layer.{name}" for name in ("rms", "q", "k", "v", "rope", "attn", "o", "gate", "up", "down")]


class Ill:
    """A model whose lowest cosine is bad while a faulty (kernel, layer) is not exchanged."""

    def __init__(self, faulty: set[tuple[str, int]], layers: int = 30, path: str = "prefill") -> None:
        self.form = self
        self.n_layers = layers
        self.fed = (3,)
        self.faulty = faulty
        self.path = path
        self.runs = 0

    def lowest(self, path: str, chosen: Callable[[str, int], bool]) -> float:
        self.runs += 1
        ill = [one for one in self.faulty if not chosen(*one)]
        return 0.5 if ill and path in (self.path, "decode") else 0.995

    def kernels(self, path: str) -> list[str]:
        return KERNELS


def search(model: Any) -> Any:
    return halves(model)


@pytest.mark.parametrize("layer", [0, 1, 14, 28, 29])
@pytest.mark.parametrize("kernel", [KERNELS[0], KERNELS[5], KERNELS[-1]])
def test_one_kernel_of_one_layer(layer: int, kernel: str) -> None:
    model = Ill({(kernel, layer)})
    found = search(model)
    assert found.kernel == kernel
    assert f"look at layer {layer}, at {kernel}" in found.note
    assert (found.before, found.after, found.healed) == (0.5, 0.995, True)
    assert model.runs <= 14, "30 layers and 10 kernels by halves"


def test_a_fault_that_only_decode_has() -> None:
    found = search(Ill({(KERNELS[8], 3)}, path="decode"))
    assert found.note.startswith("decode: ")
    assert found.kernel == KERNELS[8]


def test_a_kernel_that_is_ill_in_every_layer() -> None:
    found = search(Ill({(KERNELS[4], layer) for layer in range(30)}))
    assert found.kernel == "layer 29"
    assert "layers before it are ill as well" in found.note


def test_no_kernel_is_at_fault() -> None:
    """Exchanging all of them heals nothing."""
    model = Ill({("the host", 0)})
    model.lowest = lambda *a: 0.5  # type: ignore[method-assign]
    found = search(model)
    assert found.kernel == "all layers"
    assert not found.healed
    assert "no kernel is at fault; look at the host's part" in found.note


def test_a_healthy_model() -> None:
    assert search(Ill(set())) is None


@pytest.mark.parametrize("n", [1, 2, 3, 7, 30])
def test_fewest(n: int) -> None:
    for wanted in range(1, n + 1):
        asked: list[int] = []

        def healed(count: int, wanted: int = wanted, asked: list[int] = asked) -> bool:
            asked.append(count)
            return count >= wanted

        assert fewest(n, healed) == wanted
        assert len(asked) <= 6
