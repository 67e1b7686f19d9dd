"""Laws 5 and 7 for any operation: what is declared runs, writes no input, reads no garbage."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from fp8core.backend_api import OpDesc
from fp8core.testing import inputs
from fp8core.testing.calls import Case, arguments
from fp8core.testing.checks import EVERY_OP, law
from fp8core.testing.compare import Broken, require, same_bits, signature
from fp8core.testing.laws.alone import judged, outcome
from fp8core.testing.subject import Subject, on_cpu
from fp8core.torch_ops.private import TorchDispatchMode, pytree

ALIKE = 2.0**-6
"""How far results of one computation may be apart, as a share of the largest: garbage is further.

Two runs need not agree bit for bit, as sums may be taken in another order.
"""

_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class _Garbage(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Fills every new tensor that nobody has filled with one byte: 0xff is NaN in most formats."""

    def __init__(self, byte: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._byte = byte

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _EMPTY and made.untyped_storage().nbytes():
            memory = torch.empty(0, dtype=torch.uint8, device=made.device)
            memory.set_(made.untyped_storage()).fill_(self._byte)
        return made


def _alike(what: str, ours: Any, theirs: Any) -> None:
    """Require the results of two calls to be the same but for the order of sums."""
    require(signature(ours) == signature(theirs), f"{what}: another shape or dtype")
    for one, other in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        if not isinstance(one, torch.Tensor):
            continue
        if not one.is_floating_point():
            same_bits(what, one, other)
            continue
        one, other = one.double(), other.double()
        finite = other.isfinite()
        require(
            torch.equal(one[~finite].nan_to_num(), other[~finite].nan_to_num()),
            f"{what}: non-finite values in other places",
        )
        if finite.any():
            allowed = ALIKE * float(other[finite].abs().max())
            error = (one[finite] - other[finite]).abs().nan_to_num(nan=torch.inf)
            worst = float(error.max())
            require(worst <= allowed, f"{what}: differs by {worst:.3g}, at most {allowed:.3g}")


@law(7, *EVERY_OP)
def what_is_declared_runs(subject: Subject, desc: OpDesc) -> None:
    """A supported descriptor runs, and returns tensors of the right shapes, dtypes and device."""
    call = arguments(subject, desc)
    expected = signature(judged(subject, call)[0])
    try:
        made = call.run(subject)
    except Exception as error:  # a third party's backend may raise anything
        raise Broken(
            f"says that it supports {desc}, but raises {type(error).__name__}: {error}"
        ) from error
    require(signature(made) == expected, f"returned {signature(made)}, expected {expected}")
    for part in pytree.tree_leaves(made):
        if isinstance(part, torch.Tensor):
            require(part.device == subject.device, f"returned a tensor on {part.device}")


@law(5, *EVERY_OP)
def inputs_are_not_written(subject: Subject, desc: OpDesc) -> None:
    """No argument changes but out and amax_out, and what is returned shares no memory with one."""
    call = arguments(subject, desc)
    before = on_cpu(call.protected())
    made = call.run(subject)
    leaves = zip(pytree.tree_leaves(call.protected()), pytree.tree_leaves(before), strict=True)
    owned = {_memory(part): at for at, part in enumerate(pytree.tree_leaves(made))}
    for at, (one, other) in enumerate(leaves):
        if isinstance(one, torch.Tensor):
            same_bits(f"input tensor {at}", one, other)
            taken = owned.get(_memory(one))
            require(taken is None, f"tensor {taken} of the result is memory of input tensor {at}")


def _memory(leaf: Any) -> object:
    """Return what two tensors have in common if one is a view of the other."""
    is_stored = isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes()
    return leaf.untyped_storage().data_ptr() if is_stored else object()


@law(7, *EVERY_OP)
def no_result_depends_on_uninitialised_memory(subject: Subject, desc: OpDesc) -> None:
    """Results are the same whatever new memory holds."""
    outcomes = []
    for byte in (None, 0xFF, 0x5A):
        call = arguments(subject, desc)
        if byte is None:
            made = call.run(subject)
        else:
            with _Garbage(byte):
                made = call.run(subject)
        outcomes.append(outcome(call, made))
    for byte, found in zip((0xFF, 0x5A), outcomes[1:], strict=True):
        _alike(f"with new memory full of {byte:#x}", found, outcomes[0])


VIEWED = tuple(op for op in EVERY_OP if op not in ("gemm", "grouped_gemm", "scale_update"))
SIZES = ((), (64, 64))  # where rows and columns are as many, nothing but strides tells them apart


@law(7, *VIEWED)
def inputs_may_have_any_strides(subject: Subject, desc: OpDesc) -> None:
    """Inputs with gaps, by columns, at odd addresses or repeated are read as what they are."""
    views = {
        "strided": inputs.strided,
        "shifted": inputs.shifted,
        "transposed": inputs.transposed,
        "expanded": inputs.expanded,
    }
    for size, (what, view) in itertools.product(SIZES, views.items()):
        call = arguments(subject, desc, Case(size=size))

        def spread(x: torch.Tensor, view: Any = view) -> torch.Tensor:
            is_repeatable = x.is_floating_point() or view is not inputs.expanded
            return view(x) if x.dtype != torch.int64 and is_repeatable else x

        viewed = call._replace(arguments=pytree.tree_map_only(torch.Tensor, spread, call.arguments))
        plain = viewed._replace(
            arguments=pytree.tree_map_only(torch.Tensor, _contiguous, viewed.arguments),
            keywords=viewed.again().keywords,
        )
        first, second = viewed.run(subject), plain.run(subject)
        shape = f" of {list(size)}" if size else ""
        _alike(f"{what} input{shape}", outcome(viewed, first), outcome(plain, second))


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)
