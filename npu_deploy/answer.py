"""What a deployment command answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from npu_deploy.errors import OK


@dataclass(frozen=True)
class Answer:
    """JSON-able data, the same for people, and the exit code (see `npu_deploy`)."""

    data: dict[str, Any]
    lines: tuple[str, ...]
    exit_code: int = OK

    def text(self) -> str:
        """Lines for a terminal."""
        return "\n".join(self.lines)
