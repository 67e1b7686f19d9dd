"""``use_backend`` and ``leaving_out``: the backends that the program chooses, and those that it
leaves out, for each thread."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from fp8core.backend_api import OPS
from fp8core.dispatch import plugins, settings
from fp8core.errors import RecipeError
from fp8core.torch_ops.capture import is_faked
from fp8core.torch_ops.private import FAKE, mode_of

LeftOut: TypeAlias = "tuple[tuple[str, str, str], ...]"
"""Backends that are left out: each with an operation, and why."""

Values: TypeAlias = "tuple[str | None, tuple[tuple[str, str], ...], LeftOut]"
"""The fields of a :class:`Policy`, as torch.compile takes constants."""


@dataclass(frozen=True, slots=True)
class Policy:
    """The backends that the program names, for every operation and for single ones, and those that
    it leaves out. ``faked_in`` is the FakeTensorMode in which results have no values, if one is:
    what is bound there may hold tensors of it."""

    backend: str | None = None
    op_backends: tuple[tuple[str, str], ...] = ()
    left_out: LeftOut = ()
    faked_in: weakref.ReferenceType[Any] | None = None

    def values(self) -> Values:
        """Return the fields, of a graph: ``Policy(*values)`` is an equal policy."""
        return self.backend, self.op_backends, self.left_out

    def leaving_out(self, left_out: LeftOut) -> Policy:
        """Return the policy that also leaves these out."""
        added = [each for each in left_out if each not in self.left_out]
        return replace(self, left_out=(*self.left_out, *added))

    def why_left_out(self, backend: str, op: str) -> str | None:
        """Say why ``backend`` is left out of ``op``, or None."""
        reasons = [why for *left, why in self.left_out if left == [backend, op]]
        return "; ".join(reasons) or None


NO_POLICY = Policy()


class _Active(threading.local):
    def __init__(self) -> None:
        self.policy = NO_POLICY
        self.outer: list[Policy] = []


_active = _Active()


def chosen() -> Policy:
    """Return what the calling thread's program chose, in a FakeTensorMode or outside of one."""
    return _active.policy


def current() -> Policy:
    """Return the calling thread's policy, on which depends what is bound now."""
    if is_faked():
        return replace(_active.policy, faked_in=weakref.ref(mode_of(FAKE)))
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


@contextlib.contextmanager
def leaving_out(backend: str, /, *ops: str, because: str) -> Iterator[None]:
    """Choose ``backend`` for none of ``ops``, by default for no operation at all, inside.

    ``because``, a text that is not empty, is its verdict wherever choices are explained. An
    operation that only a backend left out can run is refused, and so is one for which the program
    or the environment names such a backend. Nested uses add to the outer ones; affects the calling
    thread alone. Backward uses the backends that were chosen in forward. Torch's own operators,
    which transforms of torch.func and second derivatives run, are no backend's.

    Raises:
        RecipeError: no such backend or operation, or no reason.
        PluginError: the backend's plug-in failed to load; the message holds the reason.
    """
    for name in (backend, *ops, because):
        if not isinstance(name, str):
            raise RecipeError(
                f"leaving_out(): got {name!r} ({type(name).__name__}); the backend, each "
                f"operation and because are str."
            )
    for op in ops:
        settings.check_op(op, "leaving_out()")
    plugins.load().spec(backend, "leaving_out()")
    if not because:
        raise RecipeError(f"leaving_out({backend!r}): because is empty; say why.")
    left_out = tuple((backend, op, because) for op in ops or OPS)
    with activated(chosen().leaving_out(left_out)):
        yield
