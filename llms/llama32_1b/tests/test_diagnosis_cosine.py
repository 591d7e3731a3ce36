"""Phase 6: cosine per layer against the reference, prefill and decode; judges only what is broken."""

from llms.verify.suite import test_diagnosis_cosine  # noqa: F401
