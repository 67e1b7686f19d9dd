"""Laws 5 and 7 for any operation: what is declared runs, writes no input, reads no garbage."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from fp8core.backend_api import AddNormDesc, FusedDesc, OpDesc
from fp8core.testing import inputs
from fp8core.testing.calls import Call, arguments
from fp8core.testing.checks import EVERY_OP, law
from fp8core.testing.compare import Broken, require, same_bits, signature
from fp8core.testing.laws.fused import add_pair, pair
from fp8core.testing.subject import Subject, on_cpu

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


def _outcome(call: Call, result: Any) -> Any:
    """Return what a call made, the arguments that it wrote included, on the CPU."""
    written = [value for at, value in enumerate(call.arguments) if at in call.written]
    written += [value for name, value in call.keywords.items() if name in call.written]
    return on_cpu((result, written))


def _expected(subject: Subject, call: Call) -> Any:
    if isinstance(call.desc, FusedDesc):
        return pair(subject.judged, call)
    if isinstance(call.desc, AddNormDesc):
        return add_pair(subject.judged, call)
    return subject.judged(call.desc, *call.arguments, **call.keywords)


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
    expected = signature(_expected(subject, call))
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
        outcomes.append(_outcome(call, made))
    for byte, outcome in zip((0xFF, 0x5A), outcomes[1:], strict=True):
        _alike(f"with new memory full of {byte:#x}", outcome, outcomes[0])


@law(7, *(op for op in EVERY_OP if op not in ("gemm", "grouped_gemm", "dequantize")))
def inputs_may_have_any_strides(subject: Subject, desc: OpDesc) -> None:
    """Inputs with gaps, by columns, at odd addresses or repeated are read as what they are."""
    views = {"strided": inputs.strided, "shifted": inputs.shifted, "expanded": _expanded}
    for what, view in views.items():
        call = arguments(subject, desc)
        if call.written & {0, 1}:
            return

        def spread(x: Any, view: Any = view) -> Any:
            is_matrix = isinstance(x, torch.Tensor) and x.ndim == 2 and x.is_floating_point()
            return view(x) if is_matrix else x

        viewed = call._replace(arguments=tuple(map(spread, call.arguments)))
        plain = viewed._replace(
            arguments=tuple(
                x.contiguous() if isinstance(x, torch.Tensor) else x for x in viewed.arguments
            ),
            keywords=viewed.again().keywords,
        )
        first, second = viewed.run(subject), plain.run(subject)
        _alike(f"{what} input", _outcome(viewed, first), _outcome(plain, second))


def _expanded(x: torch.Tensor) -> torch.Tensor:
    """Return the middle row of ``x`` as every row, at stride 0: the gradient of a sum."""
    return x[len(x) // 2 :][:1].expand(len(x), -1)
