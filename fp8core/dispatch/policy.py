"""``use_backend``: the backends that the program chooses, for each thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from fp8core.dispatch import plugins, settings


@dataclass(frozen=True, slots=True)
class Policy:
    """The backends that the program names: for every operation, and for single ones."""

    backend: str | None = None
    op_backends: tuple[tuple[str, str], ...] = ()


NO_POLICY = Policy()


class _Active(threading.local):
    def __init__(self) -> None:
        self.policy = NO_POLICY
        self.outer: list[Policy] = []


_active = _Active()


def current() -> Policy:
    """Return the calling thread's policy."""
    return _active.policy


@contextlib.contextmanager
def activated(policy: Policy) -> Iterator[None]:
    """Have the calling thread dispatch by ``policy``."""
    outer, _active.policy = _active.policy, policy
    try:
        yield
    finally:
        _active.policy = outer


class use_backend:
    """Context manager: use backend ``name`` for every operation, or ``op=name`` for single ones.

    ``with use_backend("reference"):`` or ``with use_backend(gemm="cuda", quantize="reference"):``.
    Nested uses refine the outer one; re-entrant; affects the calling thread alone. Backward uses
    the backends that were chosen in forward.

    Raises:
        RecipeError: no such backend or operation; raised at once, not at first use.
        PluginError: the backend's plug-in failed to load; the message holds the reason.
    """

    def __init__(self, name: str | None = None, /, **op_backends: str) -> None:
        registry = plugins.load()
        for op in op_backends:
            settings.check_op(op, "use_backend()")
        for backend in (*([name] if name is not None else []), *op_backends.values()):
            registry.spec(backend, "use_backend()")
        self._name = name
        self._op_backends = op_backends

    def __enter__(self) -> None:
        outer = _active.policy
        # A backend for every operation also overrides outer choices for single operations.
        inherited = {} if self._name is not None else dict(outer.op_backends)
        ops = tuple(sorted({**inherited, **self._op_backends}.items()))
        _active.outer.append(outer)
        _active.policy = replace(outer, backend=self._name or outer.backend, op_backends=ops)

    def __exit__(self, *error: Any) -> None:
        _active.policy = _active.outer.pop()
