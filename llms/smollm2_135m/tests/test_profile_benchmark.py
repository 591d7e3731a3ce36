"""Phase 6: TTFT and time per output token on the device clock, with the breakdown of both."""

from llms.verify.suite import ready, test_ttft, test_time_per_output_token  # noqa: F401, I001
