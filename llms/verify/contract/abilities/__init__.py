"""Optional abilities of an adapter or its runner: what phases need beyond ``prefill`` and ``decode_step``.

A gate asks with :func:`needed`, or with :func:`offered` where it can do without. What lacks the ability gets
"not offered", never a pass. An ability only computes: references, inputs and limits stay with the gates.

* ``weight_ledger()``, ``rope_table()`` of the runner: phase 0
* ``forms() -> Forms`` of the runner: phases 3 to 5
* ``performance(tokenise, n_tokens) -> Performance`` of the runner: the performance tests of phase 6
* ``decode_step_probed``, ``kv_cache``, ``prompt_limits``, ``device_arithmetic`` of the runner: the ladder
* ``kernel_bench(folder) -> KernelBench`` of the adapter: phase 1
* ``watch(folder, adapter, config) -> Watch`` of the toolkit: phase 7. It is handed in by whoever starts the
  audit, as who is audited does not choose who watches.
* ``launch_probe() -> LaunchProbe`` of the runner: the bisect
* ``needed_artefacts(request) -> ArtefactList | None`` of the adapter: the checks before a run on silicon
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class NotOffered(Exception):
    """The adapter or the runner lacks the ability that a gate needs; the text names it."""


def offered(provider: object, name: str) -> Callable[..., Any] | None:
    """The function of this name of a runner or an adapter module, or None when it has none.

    Where the ``build_runner`` of an adapter is the method of an object, what that object offers counts, too,
    so that a model folder need not name every ability.
    """
    owner = getattr(getattr(provider, "build_runner", None), "__self__", None)
    for candidate in (provider, owner):
        method: Callable[..., Any] | None = getattr(candidate, name, None)
        if callable(method):
            return method
    return None


def needed(provider: object, name: str) -> Callable[..., Any]:
    """The function of this name. Raises NotOffered."""
    method = offered(provider, name)
    if method is None:
        kind = "adapter" if hasattr(provider, "build_runner") else "runner"
        raise NotOffered(f"the {kind} has no {name}() (a {type(provider).__name__})")
    return method
