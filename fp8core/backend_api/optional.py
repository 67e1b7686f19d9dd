"""Members that a backend may have for speed alone; without them, it is complete.

:class:`Chunks` and :class:`ComputedRows` belong to variants of descriptors; see
:func:`fp8core.backend_api.variant_of`. :class:`RecordsCalls` and :class:`MovesBeside` are protocols
of the backend itself.

A callable that :meth:`fp8core.backend_api.Backend.bind` returns may have these attributes:

- ``kernel``, a text, which ``explain`` shows as the name of what runs on the device; without it,
  that is the qualified name of the callable;
- ``other_kernels``, pairs of texts: each kernel of the backend that the call does not run, and the
  reason, in the order of preference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch

from fp8core.backend_api.operand_spec import Operand
from fp8core.backend_api.spec import OpDesc


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """A rowwise operand ``[rows, k]``, quantized some rows at a time while a caller reads the
    chunks, once: a large gradient then needs less memory than all of its codes.

    ``parts`` returns the chunks, all rows in their order: ``(start, end, operand)``, the operand of
    rows ``start`` to ``end``, whose memory the next chunk may overwrite.
    """

    rows: int
    parts: Callable[[], Iterator[tuple[int, int, Operand]]]

    def __iter__(self) -> Iterator[tuple[int, int, Operand]]:
        return self.parts()


class QuantizedChunks(NamedTuple):
    """Both orientations of one tensor; ``columnwise`` is complete when ``rowwise`` is read."""

    rowwise: Chunks
    columnwise: Operand


class ComputedRows(Protocol):
    """A tensor whose ``shape`` is ``[rows, cols]``, computed some rows at a time while a reader
    asks for the rows, once."""

    shape: Sequence[int]

    def rows_of(self, start: int, end: int) -> torch.Tensor:
        """Return rows ``start`` to ``end``, contiguous and on a multiple of 16 bytes.

        A reader calls for all rows, in order; no later call has more rows than the first. The next
        call may overwrite the memory of the rows.
        """


Repeat: TypeAlias = Callable[..., tuple[torch.Tensor | None, ...] | None]
"""A recorded run, to be repeated for other tensors: ``repeat(leading, saved=None)``.

The caller passes tensors like the recorded tensors, in the same order, ``leading`` in a tuple and
``saved`` in a list: of the same class, dtype, device, sizes and strides, and distinct. The results
are those of the run for these tensors, the same bits in new memory. ``saved`` is emptied: each
tensor is dropped after its last reader. The repeat itself checks whether addresses fit: None if
they do not; nothing was computed then.
"""


class Recording(NamedTuple):
    """The results of a run, and the callable that repeats the run; None if the run did something
    that cannot be repeated."""

    results: Sequence[torch.Tensor | None]
    repeat: Repeat | None


class Recorder(Protocol):
    """Records runs of bound operations on one device, so that a repeated run is one call."""

    def record(
        self,
        run: Callable[[], Sequence[torch.Tensor | None]],
        leading: Sequence[torch.Tensor],
        saved: Sequence[torch.Tensor | None] = (),
        constants: Sequence[torch.Tensor] = (),
    ) -> Recording:
        """Call ``run`` once, and record it.

        ``run`` returns tensors that bound operations computed from ``leading`` and ``saved``, and
        from ``constants``, the tensors that are the same in each repeat and may be written: delayed
        scales, amaxes, counters. ``run`` has no other effect, and may empty a list ``saved``.
        An operation of torch within the run has to be repeated by the recorder as well, or to be
        noticed: the recording then has no ``repeat``. ``new_empty`` is an allocation.
        """

    def call(self, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        """Return ``function(*tensors)``, called once within a run that this thread records: what no
        backend has bound, as a collective.

        Each repeat calls the function at this point of the run, with its own tensors in the places
        of ``tensors``, which are arguments or results of the run, or views of these. The function
        returns a tensor, which may be one of ``tensors``; operations inside it are not recorded.
        """


@runtime_checkable
class RecordsCalls(Protocol):
    """A backend that can record runs of the operations that it has bound."""

    def recorder(self, desc: OpDesc, device: torch.device) -> Recorder | None:
        """Return the recorder of calls of ``desc`` on ``device``, None if there is none.

        Operations with the same recorder can be recorded in one run.
        """


@dataclass(eq=False, repr=False)
class Ranks:
    """The group of ranks between which rows move: this process is ``rank`` of ``size``, and
    ``group_name`` is the group's name in torch.distributed."""

    size: int
    rank: int
    group_name: str


class Sending(Protocol):
    """A sum over ranks under way, of which each rank gets a part of the rows.

    For each other rank, in ``order``, a rank writes its addend to that rank's part into
    ``part(rank)`` on the current stream, and calls ``send(rank)``. ``finish`` is the last call.
    """

    order: Sequence[int]

    def part(self, rank: int) -> torch.Tensor:
        """Return unfilled, contiguous memory for this rank's addend to the part of ``rank``."""

    def send(self, rank: int) -> None:
        """Start to move the contents of ``part(rank)``."""

    def finish(self, mine: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
        """Start to add the other ranks' addends to ``mine``, this rank's addend to its own part.

        Returns the sum, and a function that has the current stream wait for the sum; ``mine`` is
        read until then. The order of the addends is any; each sum is rounded to the dtype or not at
        all.
        """


class Transfers(Protocol):
    """Moves the rows of contiguous tensors between ranks beside products: copies that leave the
    device's processors to them.

    All ranks make the same calls in the same order, with tensors of equal shapes. Calls start work
    on the current stream and do not wait on the host; several may be under way.
    """

    def takes(self, num_bytes: int) -> bool:
        """Say whether a rank's part of ``num_bytes`` is moved, the same on every rank. Small parts
        are faster by a collective of the process group."""

    def gather(self, x: torch.Tensor) -> tuple[torch.Tensor, Callable[[int], object]]:
        """Start to concatenate the ``x`` of all ranks along dimension 0.

        Returns the result, and a function that has the current stream wait for the rows of a rank.
        The function is called at most once for each rank, in the order of a circle: first for the
        next rank, last for this rank, whose rows are those of ``x``.
        """

    def scatter(self, size: Sequence[int], dtype: torch.dtype) -> Sending:
        """Start a sum over ranks of which each rank gets a part of ``size``."""

    def maximum(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the elementwise maximum of the ``x`` of all ranks, a new tensor: of a few numbers
        of each, such as amaxes.

        None, on every rank, for tensors that the process group reduces faster. ``explain`` calls
        with a tensor on meta, of which nothing is read.
        """


@runtime_checkable
class MovesBeside(Protocol):
    """A backend that can move rows between ranks beside its products."""

    def transfers(self, ranks: Ranks, device: torch.device) -> Transfers | None:
        """Return the transfers of rows on ``device`` between ``ranks``, None if there are none.

        A layer that is bound calls this on all ranks. The method neither talks to another rank nor
        takes memory of the device.
        """
