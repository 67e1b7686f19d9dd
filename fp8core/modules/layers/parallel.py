"""Tensor and sequence parallelism of a layer: Transformer Engine's arguments, and their links.

A column-parallel linear has some of the output features, a row-parallel one some of the input
features, on each rank of a group. With sequence parallelism the tensors between the two, which all
ranks would hold otherwise, are split by rows::

    column   gather, linear              or, without sequence parallelism, replicate, linear
    row      linear, scatter, bias       or, without sequence parallelism, linear, all_reduce, bias
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from fp8core.chain.linear.shape import LinearShape
from fp8core.chain.moving import MovingShape
from fp8core.chain.shape import LinkShape
from fp8core.collectives import Communicator, named, of_group
from fp8core.collectives.base import is_process_group
from fp8core.errors import OperandError
from fp8core.modules.calls.base import LowPrecisionModule

_MODES = ("column", "row", None)


class Parallel(NamedTuple):
    """How a layer is spread over a group of ``size`` ranks, called ``group``, as number ``rank``.

    ``group`` is "" as long as a layer has none, and in a layer of one rank. ``sequence``: the rows
    outside of the parallel linears are split over the ranks. A plain value, which torch.compile
    compares and which a copy of the layer keeps.
    """

    size: int = 1
    group: str = ""
    sequence: bool = False
    rank: int = 0

    @classmethod
    def of(cls, owner: str, tp_group: object, tp_size: int, sequence: bool) -> Parallel:
        """Return the ranks and options for the arguments of the layer ``owner``.

        A group decides about the size, as in Transformer Engine; without one, ``tp_size`` ranks
        get theirs by ``set_tensor_parallel_group``.

        Raises:
            OperandError: ``tp_group`` is no group with this rank, or ``tp_size`` no integer from 1.
        """
        if isinstance(tp_size, bool) or not isinstance(tp_size, int) or tp_size < 1:
            raise OperandError(f"{owner}(tp_size={tp_size!r}): expected an integer >= 1.")
        if tp_group is None:
            return cls(tp_size, "", bool(sequence) and tp_size > 1)
        if not is_group(tp_group):
            raise OperandError(
                f"{owner}(tp_group={tp_group!r}): expected a torch.distributed process group."
            )
        communicator = of_group(tp_group)  # type: ignore[arg-type]  # checked above
        size = communicator.size
        if tp_size not in (1, size):
            raise OperandError(
                f"{owner}(tp_size={tp_size}): the given tp_group has {size} ranks. Leave out "
                f"tp_size, or give the group of that size."
            )
        name = communicator.group_name if size > 1 else ""
        return cls(size, name, bool(sequence) and size > 1, communicator.rank)

    def part_of(self, owner: str, name: str, size: int) -> int:
        """Return a rank's share of ``size``, which the argument ``name`` of ``owner`` gives.

        Raises:
            OperandError: the ranks do not divide it.
        """
        if size % self.size:
            raise OperandError(
                f"{owner}({name}={size}): the {self.size} ranks of its group do not divide it. "
                f"Choose a multiple of {self.size}, or a group of another size."
            )
        return size // self.size

    def gathered(self, leading: Sequence[int]) -> tuple[int, ...]:
        """Return the leading dimensions of what a column-parallel linear returns, from those of its
        input."""
        if not self.sequence or not leading:  # an input without rows is refused by the linear
            return tuple(leading)
        return (leading[0] * self.size, *leading[1:])

    @property
    def before_column(self) -> tuple[LinkShape, ...]:
        """The links before a column-parallel linear."""
        if self.size == 1:
            return ()
        return (MovingShape("gather" if self.sequence else "replicate", self.group),)

    @property
    def after_row(self) -> tuple[LinkShape, ...]:
        """The links after a row-parallel linear, whose bias comes behind them."""
        if self.size == 1:
            return ()
        return (MovingShape("scatter" if self.sequence else "all_reduce", self.group),)


ALONE = Parallel()
"""A layer of one rank."""


class ParallelModule(LowPrecisionModule):
    """Base of the layers that may be spread over ranks, with Transformer Engine's attributes."""

    parallel: Parallel = ALONE
    parallel_mode: str | None = None
    save_original_input = False
    # Who forks the random state for weights that differ between ranks, and under which name.
    _tracker: tuple[Callable[[], Any] | None, str | None] = (None, None)

    @property
    def tp_size(self) -> int:
        """Over how many ranks the layer is spread."""
        return self.parallel.size

    @property
    def sequence_parallel(self) -> bool:
        """Whether rows outside of the parallel linears are split over the ranks."""
        return self.parallel.sequence

    @property
    def tp_group(self) -> object | None:
        """The group; None for a layer of one rank, and before :meth:`set_tensor_parallel_group`."""
        if not self.parallel.group:
            return None
        communicator = named(self.parallel.group)
        return getattr(communicator, "group", communicator)

    def set_tensor_parallel_group(self, tp_group: object | None) -> None:
        """Give the layer, made with ``tp_size``, its group; call it before the first forward.

        Raises:
            OperandError: the group has another number of ranks, or this rank is not in it.
        """
        owner = f"{self.label}.set_tensor_parallel_group"
        if tp_group is None and self.parallel.size == 1:
            return
        parallel = Parallel.of(owner, tp_group, 1, self.parallel.sequence)
        if parallel.size != self.parallel.size:
            raise OperandError(
                f"{owner}: the group has {parallel.size} ranks, but the layer was made for "
                f"tp_size={self.parallel.size}, and has its share of the weights."
            )
        self.parallel = parallel
        self.unbind()

    def set_sequence(self, sequence: bool) -> None:
        """Say whether rows outside of the parallel linears are split over the ranks from now on."""
        if sequence != self.parallel.sequence:
            self.parallel = self.parallel._replace(sequence=sequence)
            self.unbind()

    def _set_parallel(
        self,
        mode: object,
        arguments: tuple[object, int, bool],
        tracker: object,
        rng_tracker_name: str | None = None,
    ) -> None:
        """Set what Transformer Engine's arguments ask for; ``arguments`` are tp_group, tp_size and
        sequence_parallel.

        Raises:
            OperandError: an argument that is none of theirs.
        """
        owner = type(self).__name__
        if mode not in _MODES:
            raise OperandError(
                f"{owner}(parallel_mode={mode!r}): expected 'column', 'row' or None."
            )
        if tracker is not None and not callable(tracker):
            raise OperandError(
                f"{owner}(get_rng_state_tracker={tracker!r}): expected a function that returns a "
                f"tracker, whose fork() is a context."
            )
        self.parallel_mode = mode if mode is None else str(mode)
        self.parallel = Parallel.of(owner, *arguments)
        self._tracker = (tracker, rng_tracker_name)

    def _linear_shape(
        self, features: tuple[int, int], weight: str, bias: str | None, groups: int = 0
    ) -> LinearShape:
        """Return the shape of a linear whose parameters have these names; None: it adds no bias."""
        return LinearShape(
            *features,
            self.dtype_of(weight),
            None if bias is None else self.dtype_of(bias),
            groups,
            accumulates=self.fuse_wgrad_accumulation,
            delays_wgrad=self.wgrad_queue is not None,
            saves_input=self.save_original_input,
        )

    def _forked(self) -> AbstractContextManager[Any]:
        """Return the context in which weights that differ between ranks are filled."""
        get_tracker, name = self._tracker
        if get_tracker is None:
            return contextlib.nullcontext()
        tracker = get_tracker()
        context: AbstractContextManager[Any] = tracker.fork(name) if name else tracker.fork()
        return context


def set_group(module: torch.nn.Module, tp_group: object | None) -> None:
    """Give the layers inside ``module`` that are spread over ranks their group."""
    for child in module.modules():
        if isinstance(child, ParallelModule) and child.tp_size > 1:
            child.set_tensor_parallel_group(tp_group)


def is_group(value: object) -> bool:
    """Say whether ``value`` is a process group, or a communicator."""
    # The value of a group for ranks outside of it is an integer.
    is_outside = isinstance(value, int) and not isinstance(value, bool)
    if is_outside and torch.distributed.is_available():
        return True
    return isinstance(value, Communicator) or is_process_group(value)


def mark_weight(parameter: torch.Tensor | None, dim: int) -> None:
    """Set the attributes by which Megatron knows a parameter that is split along ``dim``."""
    if parameter is not None:
        vars(parameter).update(tensor_model_parallel=True, partition_dim=dim, partition_stride=1)


def mark_norm(parameters: Iterable[torch.Tensor | None], sequence_parallel: bool) -> None:
    """Set the attribute by which Megatron knows a parameter whose gradient it has to sum over
    ranks, as each sees some of the rows or heads."""
    for parameter in parameters:
        if parameter is not None:
            vars(parameter).update(sequence_parallel=sequence_parallel)
