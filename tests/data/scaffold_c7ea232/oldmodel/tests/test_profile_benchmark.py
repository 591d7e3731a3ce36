"""Phase 6: TTFT and time per output token on the device clock, with the breakdown of both."""

import pytest

from llms.deploy.compare import beside_silicon
from llms.profiling import breakdown, decode_one, first_token, set_up

pytestmark = pytest.mark.phase6
PROMPT_TOKENS = 128


@pytest.fixture(scope="module")
def ready(deployment):
    """A runner whose kernels, weights and KV cache are in place: nothing of it is timed."""
    yield set_up(deployment, PROMPT_TOKENS)
    deployment.release_runners()


def test_ttft(ready, npu_lock, npu_benchmark):
    with npu_lock:
        npu_benchmark(
            lambda: first_token(ready), seq_len=ready.n_tokens, breakdown=lambda: breakdown(ready, "prefill")
        )


def test_time_per_output_token(ready, npu_lock, npu_benchmark, npu_record):
    with npu_lock:
        first_token(ready)
        npu_benchmark(
            lambda: decode_one(ready), seq_len=ready.n_tokens, breakdown=lambda: breakdown(ready, "decode")
        )
    npu_record("comparison", beside_silicon(ready.deployment))
