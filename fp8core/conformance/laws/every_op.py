"""Laws 5 and 7 for any operation: a declared one runs, writes no input, reads no garbage."""

from __future__ import annotations

import itertools
from typing import Any

import torch

from fp8core.backend_api import OpDesc
from fp8core.conformance import inputs
from fp8core.conformance.calls import Case, arguments
from fp8core.conformance.checks import EVERY_OP, law
from fp8core.conformance.compare import Broken, require, same_bits, signature
from fp8core.conformance.laws.alone import judged, outcome
from fp8core.conformance.subject import Subject, on_cpu
from fp8core.torch_ops.private import TorchDispatchMode, pytree

TOLERANCE = 2.0**-6
"""The largest difference of two results of one computation, as a share of the largest value.

Two runs may add in another order, so their bits may differ; garbage differs by more than this.
"""

_EMPTY = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class _Garbage(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """Fills the memory of every new uninitialised tensor with one byte; 0xff is NaN in most
    formats."""

    def __init__(self, byte: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._byte = byte

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        x = func(*args, **(kwargs or {}))
        if func in _EMPTY and x.untyped_storage().nbytes():
            memory = torch.empty(0, dtype=torch.uint8, device=x.device)
            memory.set_(x.untyped_storage()).fill_(self._byte)
        return x


def _same_but_for_order(name: str, ours: Any, theirs: Any) -> None:
    """Require the results of two calls to be equal, or as near as another order of sums allows."""
    require(signature(ours) == signature(theirs), f"{name}: another shape or dtype")
    for mine, yours in zip(pytree.tree_leaves(ours), pytree.tree_leaves(theirs), strict=True):
        if not isinstance(mine, torch.Tensor):
            continue
        if not mine.is_floating_point():
            same_bits(name, mine, yours)
            continue
        mine, yours = mine.double(), yours.double()
        finite = yours.isfinite()
        require(
            torch.equal(mine[~finite].nan_to_num(), yours[~finite].nan_to_num()),
            f"{name}: non-finite values in other places",
        )
        if finite.any():
            allowed = TOLERANCE * float(yours[finite].abs().max())
            error = (mine[finite] - yours[finite]).abs().nan_to_num(nan=torch.inf)
            worst = float(error.max())
            require(worst <= allowed, f"{name}: differs by {worst:.3g}, at most {allowed:.3g}")


@law(7, *EVERY_OP)
def what_is_declared_runs(subject: Subject, desc: OpDesc) -> None:
    """A supported descriptor runs, and returns tensors of the right shapes, dtypes and device."""
    call = arguments(subject, desc)
    expected = signature(judged(subject, call)[0])
    try:
        result = call.run(subject)
    except Exception as error:  # a third party's backend may raise anything
        raise Broken(
            f"says that it supports {desc}, but raises {type(error).__name__}: {error}"
        ) from error
    require(signature(result) == expected, f"returned {signature(result)}, expected {expected}")
    for part in pytree.tree_leaves(result):
        if isinstance(part, torch.Tensor):
            require(part.device == subject.device, f"returned a tensor on {part.device}")


@law(5, *EVERY_OP)
def inputs_are_not_written(subject: Subject, desc: OpDesc) -> None:
    """Only out and amax_out are written, and the result shares no memory with another argument."""
    call = arguments(subject, desc)
    before = on_cpu(call.protected())
    result = call.run(subject)
    leaves = zip(pytree.tree_leaves(call.protected()), pytree.tree_leaves(before), strict=True)
    results = {_memory(part): at for at, part in enumerate(pytree.tree_leaves(result))}
    for at, (after, saved) in enumerate(leaves):
        if isinstance(after, torch.Tensor):
            same_bits(f"input tensor {at}", after, saved)
            shared = results.get(_memory(after))
            require(shared is None, f"tensor {shared} of the result is memory of input tensor {at}")


def _memory(leaf: Any) -> object:
    """Return a key of the leaf's memory, which is equal for a tensor and its views."""
    is_stored = isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes()
    return leaf.untyped_storage().data_ptr() if is_stored else object()


@law(7, *EVERY_OP)
def no_result_depends_on_uninitialised_memory(subject: Subject, desc: OpDesc) -> None:
    """Results do not depend on the bytes that new memory holds."""
    outcomes = []
    for byte in (None, 0xFF, 0x5A):
        call = arguments(subject, desc)
        if byte is None:
            result = call.run(subject)
        else:
            with _Garbage(byte):
                result = call.run(subject)
        outcomes.append(outcome(call, result))
    for byte, changed in zip((0xFF, 0x5A), outcomes[1:], strict=True):
        _same_but_for_order(f"with new memory full of {byte:#x}", changed, outcomes[0])


_NOT_VIEWED = ("gemm", "grouped_gemm", "scale_update", "adam")  # the last has its own law
VIEWED = tuple(op for op in EVERY_OP if op not in _NOT_VIEWED)
SIZES = ((), (64, 64))  # only strides tell the rows of a square matrix from its columns


@law(7, *VIEWED)
def inputs_may_have_any_strides(subject: Subject, desc: OpDesc) -> None:
    """Inputs with gaps, stored by columns, at odd addresses or with stride 0 are read right."""
    views = {
        "strided": inputs.strided,
        "aligned": inputs.aligned,
        "shifted": inputs.shifted,
        "transposed": inputs.transposed,
        "expanded": inputs.expanded,
    }
    for size, (layout, view) in itertools.product(SIZES, views.items()):
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
        _same_but_for_order(
            f"{layout} input{shape}", outcome(viewed, first), outcome(plain, second)
        )


def _contiguous(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)
