"""A high-precision weight, or a rank's rows of it, that FSDP2 gathers in low precision.

``torch.distributed.fsdp.fully_shard`` asks a tensor that has ``fsdp_pre_all_gather`` what to gather
in its stead, and ``fsdp_post_all_gather`` what to make of that. For all else the tensor is its
values: optimizers, clipping and checkpoints read and write those.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Protocol

import torch

from fp8core.errors import UnsupportedError
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.values import is_view, wrapper_like, written
from fp8core.torch_ops.private import IS_PARAMETER, PIN_MEMORY, no_torch_function, pytree


class Writes:
    """The values that a write to a tensor makes stale, shared by all its views: the
    ``amaxes`` of its rows, None since a write."""

    __slots__ = ("amaxes",)

    def __init__(self) -> None:
        self.amaxes: torch.Tensor | None = None

    def mark(self) -> None:
        """Note a write."""
        self.amaxes = None


class Gathering(Protocol):
    """Quantizes the rows of one weight, and puts together what was gathered of all ranks.

    ``is_gathered_whole``: whether each gather writes all of the weight that the first one made.
    """

    is_gathered_whole: bool

    def quantized(
        self, shard: ShardedWeight, mesh: Any, size: torch.Size
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Return what FSDP gathers of ``shard``, part of a weight of ``size``, and what
        :meth:`assembled` needs besides."""

    def assembled(
        self, outputs: Sequence[torch.Tensor], metadata: Any, dtype: torch.dtype
    ) -> tuple[QuantizedTensor, tuple[torch.Tensor, ...]]:
        """Return the weight, and the tensors with its memory, which FSDP frees."""

    def write(self, outputs: Sequence[torch.Tensor], metadata: Any, out: Any) -> None:
        """Complete ``out``, a weight of :meth:`assembled`, whose codes were gathered again."""


def _gather_inputs(
    shard: ShardedWeight, mesh: Any, size: torch.Size, *unused: object
) -> tuple[tuple[torch.Tensor, ...], Any]:
    return shard.gathering.quantized(shard, mesh, size)


class _Method(partial[Any]):
    """A method whose signature is at hand: FSDP inspects it in each gather, sixty calls of Python
    for one that is not."""

    __signature__ = inspect.signature(lambda mesh, size, stride, module, mp_policy: None)


class ShardedWeight(torch.Tensor):
    """``value``, a plain tensor for reading, with FSDP2's extensions of the all-gather; see the
    module. A write to ``value`` would not be noticed.

    Views of it, copies and new tensors of its kind have the same class, as FSDP and modules make
    their shards and parameters by them; results of arithmetic are plain, and so is the tensor that
    is saved.
    """

    value: torch.Tensor
    gathering: Gathering
    writes: Writes
    __torch_function__: ClassVar[Any] = no_torch_function

    @staticmethod
    def __new__(
        cls, value: torch.Tensor, gathering: Gathering, writes: Writes | None = None
    ) -> ShardedWeight:
        """Wrap ``value``; a view takes ``writes`` from the tensor that it is a view of."""
        value = value.detach()
        self: ShardedWeight = wrapper_like(cls, value)
        self.value = value
        self.gathering = gathering
        self.writes = Writes() if writes is None else writes
        return self

    def plain(self) -> torch.Tensor:
        """Return the values as a plain tensor of the same memory; gradients flow back through it.

        Layers compute with it while FSDP does not manage the weight.
        """
        result: torch.Tensor = _Plain.apply(self)  # type: ignore[no-untyped-call]  # torch's
        return result

    def numpy(self, *, force: bool = False) -> Any:
        """Return the values as an array for reading, in the same memory."""
        array = self.plain().numpy(force=force)
        array.flags.writeable = False  # a write would not be noticed
        return array

    def tolist(self) -> Any:
        """Return the values as lists."""
        return self.value.tolist()

    def share_memory_(self) -> ShardedWeight:
        """Move the values to shared memory, as torch does a tensor's storage."""
        self.value.share_memory_()  # type: ignore[no-untyped-call]  # torch's
        return self

    def is_shared(self) -> bool:
        """Say whether the values are in shared memory."""
        return bool(self.value.is_shared())  # type: ignore[no-untyped-call]  # torch's

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse: a write to the array would not be noticed.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(
            "DLPack of a weight that is gathered quantized: use the clone() of its plain()."
        )

    fsdp_pre_all_gather = property(
        partial(_Method, _gather_inputs),
        doc="Returns the tensors that FSDP gathers, and what it hands to the next method.",
    )

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> Any:
        """Return the gathered weight and the tensors with its memory, or complete ``out``."""
        if out is None:
            return self.gathering.assembled(all_gather_outputs, metadata, param_dtype)
        if not self.gathering.is_gathered_whole:
            self.gathering.write(all_gather_outputs, metadata, local_part(out))
        return None

    def __tensor_flatten__(self) -> tuple[list[str], Gathering]:
        return ["value"], self.gathering

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], gathering: Gathering, outer_size: Any, outer_stride: Any
    ) -> ShardedWeight:
        return ShardedWeight(inner["value"], gathering)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = self.value
        if getattr(self, IS_PARAMETER, False):
            plain = torch.nn.Parameter(plain, self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch's

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is untyped
        return f"ShardedWeight({self.value})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares less
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        wrappers: dict[int, ShardedWeight] = {}
        _values_in(written(func, args, kwargs), wrappers)
        for wrapper in wrappers.values():
            wrapper.writes.mark()
        out = func(*_values_in(args, wrappers), **_values_in(kwargs, wrappers))
        first = args[0] if args and isinstance(args[0], ShardedWeight) else None

        def wrap(tensor: torch.Tensor) -> torch.Tensor:
            wrapper = wrappers.get(id(tensor))
            if wrapper is not None or first is None:
                return tensor if wrapper is None else wrapper
            if is_view(func):
                return ShardedWeight(tensor, first.gathering, first.writes)
            if func.overloadpacket in _COPIES:
                return ShardedWeight(tensor, first.gathering)
            return tensor

        if isinstance(out, torch.Tensor):
            return wrap(out)
        return out if out is None else pytree.tree_map_only(torch.Tensor, wrap, out)


def _values_in(argument: Any, wrappers: dict[int, ShardedWeight]) -> Any:
    """Return an argument of an operator with plain tensors in the places of shards, which are added
    to ``wrappers`` by the id of these. An optimizer's argument is a list of all: torch's pytree
    takes twenty calls for each."""
    if isinstance(argument, ShardedWeight):
        wrappers[id(argument.value)] = argument
        return argument.value
    if isinstance(argument, dict):
        return {name: _values_in(each, wrappers) for name, each in argument.items()}
    if not isinstance(argument, list | tuple):
        return argument
    return [_values_in(x, wrappers) if isinstance(x, _HOLDING) else x for x in argument]


_HOLDING = (ShardedWeight, list, tuple, dict)


class _Plain(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: ShardedWeight) -> torch.Tensor:
        return weight.value.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def local_part(tensor: Any) -> torch.Tensor:
    """Return this rank's part of a DTensor, another tensor as it is."""
    local: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local


def as_part_of(local: torch.Tensor, whole: Any) -> torch.Tensor:
    """Return ``local`` as this rank's part of a DTensor that is placed as ``whole``; where that is
    a plain tensor, as it is."""
    if not hasattr(whole, "to_local"):
        return local
    part: torch.Tensor = type(whole).from_local(
        local,
        whole.device_mesh,
        whole.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return part


def plain_for_writing(tensor: torch.Tensor) -> torch.Tensor:
    """Return the plain tensor to which an operation of a backend writes the values of ``tensor``;
    another tensor than a ShardedWeight as it is."""
    if not isinstance(tensor, ShardedWeight):
        return tensor
    tensor.writes.mark()
    return tensor.value


_aten = torch.ops.aten
_COPIES = {_aten.clone, _aten._to_copy, PIN_MEMORY, _aten.empty_like, _aten.new_zeros}
_COPIES |= {_aten.new_empty}  # by which torch.distributed.checkpoint begins a copy of a state
