"""Optional members of bound callables, for speed alone.

A backend without them is complete. The callable that :meth:`fp8core.backend_api.Backend.bind`
returns may have the members of these protocols, for the descriptors that each names. Members are
looked up once, when the operation is bound; a method that cannot be called as written here is an
error then. A member that is None is not offered. :class:`RecordsCalls` and :class:`MovesBeside` are
of the backend, :class:`RecordsFunctions` of its recorder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import torch

from fp8core.backend_api.operand_spec import Operand, Quantized
from fp8core.backend_api.spec import OpDesc

Slots: TypeAlias = "tuple[torch.Tensor | None, torch.Tensor | None]"
"""A keyword of a pair: the value for the first tensor, and the value for the second."""


class NamesKernel(Protocol):
    """A callable of any descriptor that names the kernel that it runs.

    ``explain`` shows ``kernel``; without it, the qualified name of the callable.
    """

    kernel: str


class NamesOtherKernels(Protocol):
    """A callable of any descriptor of a backend that has several kernels for the operation.

    ``explain`` shows ``other_kernels``: each kernel that the call does not run, and why not, in the
    order of preference.
    """

    other_kernels: tuple[tuple[str, str], ...]


class Chunks(Protocol):
    """A rowwise operand ``[rows, k]`` that is quantized while it is read, once, some rows at a
    time: less memory for a large gradient than its codes as a whole.

    Iterating yields ``(start, end, operand)``: the operand of rows ``start`` to ``end``, whose
    memory the next one may overwrite. Together they are all rows, in order.
    """

    rows: int

    def __iter__(self) -> Iterator[tuple[int, int, Operand]]: ...


class QuantizedChunks(NamedTuple):
    """Both orientations of one tensor; ``columnwise`` is complete when ``rowwise`` is read."""

    rowwise: Chunks
    columnwise: Operand


class QuantizesChunked(Protocol):
    """A callable of a dense QuantizeDesc of both orientations that can quantize chunks of rows."""

    def quantize_chunked(
        self,
        x: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        amax_out: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
    ) -> Quantized | QuantizedChunks:
        """Quantize ``x`` as the call does, in chunks or, where that saves nothing, as a whole.

        ``scale`` and ``amax_out`` are given for delayed specs alone. The amax and the count are
        complete when all chunks are read.
        """


class ComputedRows(Protocol):
    """A tensor whose ``shape`` is ``[rows, cols]``, computed while it is read, once, some rows at a
    time."""

    shape: Sequence[int]

    def rows_of(self, start: int, end: int) -> torch.Tensor:
        """Return rows ``start`` to ``end``, contiguous and on a multiple of 16 bytes.

        Called for all rows, in order; no later call has more rows than the first. The next call may
        overwrite the memory.
        """


class FusesChunked(Protocol):
    """A callable of a :class:`~fp8core.backend_api.FusedDesc` of an
    :class:`~fp8core.backend_api.ActivationBackwardDesc` and a dense cast of both orientations by
    specs that round to nearest, which can compute and quantize chunks of rows. Its backend offers
    :class:`QuantizesChunked` of that cast as well."""

    def run_chunked(
        self,
        grad_output: torch.Tensor | ComputedRows,
        x: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        amax_out: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
    ) -> tuple[Any, ...]:
        """Return what the call does, with :class:`QuantizedChunks` in the place of
        :class:`~fp8core.backend_api.Quantized` unless that saves nothing.

        ``grad_output`` may come as rows that are computed when a chunk is read. The keywords are as
        of :class:`QuantizesChunked`; the amax, the count and the column sums, if
        :class:`~fp8core.backend_api.FusedDesc` asks for them, are complete when all chunks are
        read.
        """


class AddsGradients(Protocol):
    """A callable of a :class:`~fp8core.backend_api.NormBackwardDesc` that can add another gradient
    of its input, as that of a residual."""

    def run_added(
        self,
        grad_output: torch.Tensor,
        x: torch.Tensor,
        weight: torch.Tensor,
        mean: torch.Tensor | None,
        rstd: torch.Tensor,
        added: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return what the call does, with ``grad_x + added`` in the place of ``grad_x``.

        ``added`` has the shape and dtype of ``grad_x``, which is rounded before the sum is.
        """


class QuantizesAndSums(Protocol):
    """A callable of a dense QuantizeDesc that can add up the columns of the tensor while it casts
    it: a gradient, and the gradient of a bias, in one reading."""

    def quantize_and_sum(
        self,
        x: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        amax_out: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
    ) -> tuple[Quantized, torch.Tensor]:
        """Quantize ``x`` as the call does; return its column sums as well, of which
        :class:`~fp8core.backend_api.ColumnSumsDesc` says what they are.

        ``scale`` and ``amax_out`` are given for delayed specs alone.
        """


class QuantizesChunkedAndSums(Protocol):
    """A callable that is :class:`QuantizesChunked` and :class:`QuantizesAndSums` at once."""

    def quantize_chunked_and_sum(
        self,
        x: torch.Tensor,
        *,
        scale: torch.Tensor | None = None,
        amax_out: torch.Tensor | None = None,
        nonfinite_out: torch.Tensor | None = None,
    ) -> tuple[Quantized | QuantizedChunks, torch.Tensor]:
        """Quantize ``x`` as ``quantize_chunked`` does; return its column sums as well, which are
        complete when all chunks are read."""


class PairCast(Protocol):
    """The cast of two dense tensors in one call: the bits of a call for each."""

    def __call__(
        self,
        x: torch.Tensor,
        other: torch.Tensor,
        *,
        scale: Slots = (None, None),
        amax_out: Slots = (None, None),
        nonfinite_out: Slots = (None, None),
    ) -> tuple[Quantized, Quantized]:
        """Quantize both; ``scale`` and ``amax_out`` are given for delayed specs alone."""


class QuantizesPairs(Protocol):
    """A callable of a dense QuantizeDesc of both orientations that can take a second tensor along:
    a layer's input and its weight in one launch."""

    def bind_pair(self, other: Callable[..., Quantized]) -> PairCast | None:
        """Return the cast of a tensor as this call does it, and of another as ``other`` does it,
        which is a callable that the same or another backend has bound; None if there is none."""


class PreparesUpdates(Protocol):
    """A callable of a ScaleUpdateDesc that can be told once which states it updates in each step.

    Without it the call is made in each step, with the same sequences.
    """

    def prepare(
        self,
        histories: Sequence[torch.Tensor],
        scales: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        nonfinite: Sequence[torch.Tensor] = (),
    ) -> Callable[[], None]:
        """Return the update of these tensors as a function of no arguments.

        The tensors stay; their storage may be replaced between two steps (``.data``, ``set_``).
        """


class Repeat(Protocol):
    """A recorded run, to be repeated for other tensors.

    The caller passes tensors like the recorded tensors, in the same order: of the same class,
    dtype, device, sizes and strides, and distinct. The repeat itself checks whether addresses fit.
    """

    def __call__(
        self, leading: tuple[torch.Tensor, ...], saved: list[torch.Tensor | None] | None = None
    ) -> tuple[torch.Tensor | None, ...] | None:
        """Return what the run returned, for these tensors: the same bits, in new memory.

        ``saved`` is emptied, each tensor as early as it is no longer read. None if the addresses do
        not fit: then nothing was done.
        """


class Recording(NamedTuple):
    """The results of a run, and the callable that repeats it, None if the run did something that is
    not repeated."""

    results: Sequence[torch.Tensor | None]
    repeat: Repeat | None


class Recorder(Protocol):
    """Records runs of bound operations on one device, so that each is one call from then on."""

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
        Operations of torch within it are the recorder's to repeat, or to notice: then nothing is
        repeated.
        """


@runtime_checkable
class RecordsFunctions(Recorder, Protocol):
    """A recorder that also takes functions into a run that no backend has bound, as collectives."""

    def call(self, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        """Return ``function(*tensors)``, called once within a run that this thread records.

        Each repeat calls the function at this point of the run, with its own tensors in the places
        of ``tensors``, which are arguments or results of the run, or views of these. The function
        returns a tensor, also one of ``tensors``; what the function does is not recorded.
        """


@runtime_checkable
class RecordsCalls(Protocol):
    """A backend that can record runs of the operations that it has bound."""

    def recorder(self, desc: OpDesc, device: torch.device) -> Recorder | None:
        """Return what records calls of ``desc`` on ``device``, None if nothing does.

        Operations with the same recorder can be recorded in one run.
        """


class ComputesParts(Protocol):
    """A callable of a dense GemmDesc that can compute a product some rows at a time, while others
    travel between ranks or are cast."""

    def gemm_part(
        self,
        rows: int,
        a: Operand,
        b: Operand,
        *,
        bias: torch.Tensor | None = None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        """Compute the product of ``a``, which is a part of an operand of ``rows`` rows, in ``out``.

        Where the call computes the same bits in every process, these are the bits that it gives the
        same rows of the whole product. For descriptors without ``accumulate``.
        """


class Ranks(Protocol):
    """The group of ranks that rows are moved between: this one is ``rank`` of ``size``, and
    torch.distributed knows the group as ``group_name``."""

    size: int
    rank: int
    group_name: str


class Sending(Protocol):
    """A sum over ranks under way, of which each rank gets a part of the rows.

    A rank writes its addend to the part of each other rank to ``part(rank)`` on the current stream
    and calls ``send(rank)``, for one after the other in the ``order`` given. Then it calls
    ``finish``.
    """

    order: Sequence[int]

    def part(self, rank: int) -> torch.Tensor:
        """Return unfilled, contiguous memory for this rank's addend to the part of ``rank``."""

    def send(self, rank: int) -> None:
        """Start to move what was written to ``part(rank)``."""

    def finish(self, mine: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
        """Start to add what the other ranks send to ``mine``, this rank's addend to its own part.

        Returns the sum, and what has the current stream wait for it; until then ``mine`` is read.
        The addends are added in any order, each sum rounded to the dtype or not at all.
        """


class Transfers(Protocol):
    """Moves the rows of contiguous tensors between ranks beside products: copies that leave the
    device's processors to them.

    All ranks make the same calls in the same order, with tensors of equal shapes. Calls start work
    on the current stream and do not wait on the host; several may be under way.
    """

    def takes(self, num_bytes: int) -> bool:
        """Whether a rank's part of so many bytes is moved, the same answer on every rank. Small
        ones are faster by a collective of the process group."""

    def gather(self, x: torch.Tensor) -> tuple[torch.Tensor, Callable[[int], object]]:
        """Start to concatenate the ``x`` of all ranks along dimension 0.

        Returns the result, and a function that has the current stream wait for the rows of a rank.
        The function is called at most once for each rank, in the order of a circle: first for the
        next rank, last for this rank, whose rows are those of ``x``.
        """

    def scatter(self, size: Sequence[int], dtype: torch.dtype) -> Sending:
        """Start a sum of tensors of which each rank gets a part of this ``size``."""


class TakesMaxima(Protocol):
    """Transfers that also take the maximum of a few numbers of each rank, such as amaxes, in less
    time than a collective of the process group."""

    def maximum(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the elementwise maximum of the ``x`` of all ranks, a new tensor.

        None, on every rank, of tensors that the process group had better reduce. For one on meta,
        by which ``explain`` asks, nothing is read.
        """


@runtime_checkable
class MovesBeside(Protocol):
    """A backend that can move rows between ranks beside its products."""

    def transfers(self, ranks: Ranks, device: torch.device) -> Transfers | None:
        """Return what moves rows of tensors on ``device`` between ``ranks``, None if nothing does.

        Called on all ranks when a layer is bound. Neither talks to another rank nor takes memory of
        the device.
        """
