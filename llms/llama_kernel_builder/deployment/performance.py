"""What the performance tests time on a session: the ability ``performance()`` of our runner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llms.llama_kernel_builder import host_ops
from llms.llama_kernel_builder.deployment.compare import comparison
from llms.llama_kernel_builder.deployment.session import Session
from llms.llama_kernel_builder.model_config import ModelConfig
from llms.verify.contract.abilities.forms import Section


class SessionPerformance:
    """A prepared session and a prompt of a fixed length; see ``contract.abilities.Performance``."""

    def __init__(
        self,
        session: Session,
        tokenise: Callable[[], Sequence[int]],
        n_tokens: int,
        published: ModelConfig | None,
    ) -> None:
        self.session = session
        self.n_tokens = n_tokens
        self._tokenise = tokenise
        self._published = published if published is not None else session.config
        self._token = self._position = 0

    def first_token(self) -> int:
        """Tokenise, prefill, choose the first token."""
        with host_ops.host_op(self.session.profiler, "tokenize", nbytes=16 * self.n_tokens):
            ids = self._tokenise()
        self._token, _, self._position = self.session.prefill(ids)
        return self._token

    def decode_one(self) -> int:
        """One decode step after `first_token`; the position moves on and wraps at the end of the KV cache."""
        self._token, _ = self.session.decode(self._token, self._position)
        following = self._position + 1
        self._position = following if following < self.session.max_seq else self.n_tokens
        return self._token

    def breakdown(self, section: Section) -> list[dict[str, Any]]:
        """Rows per ELF, kernel, host operation and transfer of one more prefill or decode step."""
        with self.session.profiled(section) as profiler:
            (self.first_token if section == "prefill" else self.decode_one)()
        return profiler.breakdown()

    def comparison(self) -> dict[str, Any]:
        """The model beside the reference model and beside published silicon."""
        return comparison(self.session.module.MODEL, self._published)
