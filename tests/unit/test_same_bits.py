"""The digests in the repository hold here, and at the lowest setting of every library."""

from __future__ import annotations

import pytest

from tools.same_bits.__main__ import measured
from tools.same_bits.digests import committed, digests
from tools.same_bits.settings import SETTINGS, environment

TINY = ("llama32_1b", "qwen2", "qwen3_0_6b")


@pytest.mark.parametrize("model", TINY)
def test_digests_of_tiny_models(model: str) -> None:
    assert digests(model) == committed()[model]


def test_digest_at_the_lowest_setting() -> None:
    assert measured("lowest", ["qwen2"]) == {"qwen2": committed()["qwen2"]}


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["lowest", "highest"])
def test_digests_of_smollm2(setting: str) -> None:
    assert measured(setting, ["smollm2_135m"]) == {"smollm2_135m": committed()["smollm2_135m"]}


def test_settings_do_not_mix() -> None:
    base = {"PATH": "/bin", "ATEN_CPU_CAPABILITY": "avx2", "OPENBLAS_CORETYPE": "Haswell"}
    common = {"PATH": "/bin", "OMP_WAIT_POLICY": "PASSIVE"}
    assert environment("plain", base) == common
    assert environment("lowest", base) == {**common, **SETTINGS["lowest"]}


def test_a_flipped_choice_changes_the_digest() -> None:
    from npu_twin.datapath import arithmetic

    with arithmetic(rounding="nearest_even"):
        assert digests("qwen2")["twin"] != committed()["qwen2"]["twin"]
