"""Linears that are called one by one with the same input: the first casts it for all.

Each of them stays an autograd node of its own, which computes its product when it is called. What
the first has cast is handed on by a :class:`SharedInput`, and is held once for backward, as the
nodes save the same tensors. Nothing is handed on for another tensor, after a write that torch
counts, or on another stream: who gets nothing casts its input itself, with the same bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import Operand, Recorder
from fp8core.chain.call import Call
from fp8core.chain.linear.program import LinearLink, LinearProgram
from fp8core.chain.protocol import (
    Backward,
    Forward,
    Link,
    OnlyOnce,
    Out,
    Params,
    Program,
    Recordable,
    SavedList,
    Wrapper,
)
from fp8core.chain.repeated import Repeated
from fp8core.chain.request import Handover
from fp8core.tensors.quantizer import Orientations
from fp8core.torch_ops.private import is_capturing

_MOST_MISSES = 4
"""Inputs that were not read by all, as of a linear that is not called any more, before nothing is
handed on; of delayed scaling one."""


def holder_of(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor whose memory ``x`` shows, which lives as long as somebody has its values:
    ``x`` itself, unless that is a view."""
    return x if x._base is None else x._base


class Place(NamedTuple):
    """Where the values of a tensor lie, of which version, and on which stream they are read."""

    address: int
    shape: torch.Size
    strides: tuple[int, ...]
    version: int
    stream: object

    @classmethod
    def of(cls, x: torch.Tensor) -> Place | None:
        """Return the place of ``x``; None of a tensor whose writes are not counted."""
        if x.is_inference():
            return None
        stream: object = None
        if x.device.type not in ("cpu", "meta"):
            stream = torch.accelerator.current_stream(x.device).stream_id, is_capturing()
        return cls(x.data_ptr(), x.shape, x.stride(), x._version, stream)


class _Codes:
    """The operands of the tensor at ``place``, as the first has cast it for ``left`` readers, and
    the ``amax`` that it had then."""

    __slots__ = ("amax", "column", "holder", "left", "place", "row")

    def __init__(
        self,
        holder: weakref.ref[torch.Tensor],
        place: Place,
        operands: tuple[Operand, SavedList],
        amax: torch.Tensor | None,
        left: int,
    ) -> None:
        self.holder, self.place = holder, place
        self.row, self.column = operands
        self.amax, self.left = amax, left


class SharedInput:
    """Hands what one linear has cast to ``num_readers`` others, and keeps it until the last has
    read it, or the tensor is gone.

    ``amax`` is where the first records, None unless it does; its reader may be in a later step.
    ``is_strict``: the scales of all are equal as long as they cast the same tensors alone, so
    nothing is handed on after a call in which one did not.
    """

    __slots__ = ("_amax", "_codes", "_is_strict", "_misses", "num_readers")

    def __init__(self, amax: torch.Tensor | None, *, is_strict: bool) -> None:
        self._amax, self._is_strict = amax, is_strict
        self.num_readers = 0
        self._codes: _Codes | None = None
        self._misses = 0

    @property
    def is_on(self) -> bool:
        """Whether anything is handed on."""
        return self.num_readers > 0 and self._misses < (1 if self._is_strict else _MOST_MISSES)

    def put(self, x: torch.Tensor, place: Place, row: Operand, column: SavedList) -> None:
        """Take the operands of ``x``, with which each reader is about to be called."""
        if self._codes is not None:
            self._misses += 1
        self._codes = None
        if self.is_on:
            holder = weakref.ref(holder_of(x), self._forget)
            amax = None if self._amax is None else self._amax.clone()
            self._codes = _Codes(holder, place, (row, column), amax, self.num_readers)

    def take(self, x: torch.Tensor, *, columnwise: bool) -> _Codes | None:
        """Return the operands of ``x``; None if they are not those that were put last."""
        codes = self._codes
        if codes is None or codes.holder() is not holder_of(x) or codes.place != Place.of(x):
            self._misses += self._is_strict
            return None
        codes.left -= 1
        if codes.left <= 0:
            self._codes = None
        return None if columnwise and not codes.column else codes

    def _forget(self, holder: weakref.ref[torch.Tensor]) -> None:
        codes = self._codes
        if codes is not None and codes.holder is holder:
            self._codes = None
            self._misses += 1


@dataclass(frozen=True, slots=True, eq=False)
class SharingLink(Link):
    """``link``, whose input is cast by the first of those with the same :class:`SharedInput`.

    ``reads``: it takes what the first has cast, and records its amax in ``amax``; else it is the
    first. ``recorder`` is that of its chain.
    """

    link: LinearLink
    shared: SharedInput
    reads: bool
    amax: torch.Tensor | None
    recorder: Recorder | None

    @property
    def num_params(self) -> int:  # type: ignore[override]  # a field's default there
        """As the link."""
        return self.link.num_params

    @property
    def num_weights(self) -> int:  # type: ignore[override]  # as num_params
        """As the link."""
        return self.link.num_weights

    @property
    def only_once(self) -> OnlyOnce | None:
        """As the link."""
        return self.link.only_once

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> Program:
        """Return the program of a dense call; that of the link where it does more than a linear."""
        program = self.link.program(rows, needs_grad, call)
        request = program.input_request
        if type(program) is not LinearProgram or request is None or request.shards is not None:
            return program
        return SharingProgram(self, program)


class SharingProgram(Wrapper):
    """``program`` of a dense call of ``link``. What is not handed on goes through ``program``
    itself, as does backward."""

    __slots__ = ("_link", "_part", "_program")

    def __init__(self, link: SharingLink, program: LinearProgram) -> None:
        recordable, recorder = program.recordable, link.recorder
        whole: Program = program
        part: Program = _OfRows(program, link.num_params) if link.reads else _WithRows(program)
        if recorder is not None and recordable is not None:
            whole = Repeated(program, recordable, recorder)
            part = Repeated(part, recordable, recorder)
        super().__init__(whole, program.input_request)
        self._link, self._part, self._program = link, part, program

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute as the program does."""
        computed: Forward | None = None
        if out is None and type(x) is torch.Tensor:
            computed = (self._read if self._link.reads else self._put)(x, params, call)
        return self._inner.forward(x, params, call, out) if computed is None else computed

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Compute as the program does, which compiled autograd looks into."""
        program = self._program if torch.compiler.is_compiling() else self._inner
        return program.backward(grad, saved, context, call, out)

    def _put(self, x: torch.Tensor, params: Params, call: Call) -> Forward | None:
        """Return what forward does, and put what it has cast; None if nobody reads that."""
        shared, request = self._link.shared, self.input_request
        assert request is not None
        place = Place.of(x) if shared.is_on else None
        if place is None:
            return None
        y, tensors, places = self._part.forward(x, params, call)
        *saved, row, scale, outer = [tensors[at] for at in places]  # type: ignore[attr-defined]  # of this part
        shared.put(x, place, Operand(row, scale, outer), saved[:3] if request.columnwise else [])
        return y, saved, None

    def _read(self, x: torch.Tensor, params: Params, call: Call) -> Forward | None:
        """Return what forward does with what the first has cast; None if that is not of ``x``."""
        link, request = self._link, self.input_request
        assert request is not None
        codes = link.shared.take(x, columnwise=request.columnwise)
        if codes is None:
            return None
        if link.amax is not None and codes.amax is not None:
            with torch.no_grad():
                link.amax.copy_(codes.amax)
        row, *scales = [each for each in codes.row if each is not None]
        y, saved, context = self._part.forward(row, (*scales, *params), call)
        return y, [*codes.column, *saved[3:]] if request.columnwise else saved, context


class _WithRows(Program):
    """Returns the rowwise operand as well, behind what ``program`` saves: each tensor once, and as
    context the place of each."""

    __slots__ = ("_program", "recordable")

    def __init__(self, program: LinearProgram) -> None:
        self._program = program
        self.recordable: Recordable | None = program.recordable

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute as the program does."""
        request = self._program.input_request
        assert request is not None
        operands = request(x).take()
        y, saved, _ = self._program.forward(Handover(operands, x.shape[0]), params, call)
        tensors: SavedList = []
        places: dict[int, int] = {}
        for tensor in (*saved, *operands.rowwise):
            if places.setdefault(id(tensor), len(tensors)) == len(tensors):
                tensors.append(tensor)
        return y, tensors, [places[id(tensor)] for tensor in (*saved, *operands.rowwise)]


class _OfRows(Program):
    """``program`` of codes, whose scales are the first parameters; the columnwise operand is left
    out of what it saves."""

    __slots__ = ("_num_params", "_program", "recordable")

    def __init__(self, program: LinearProgram, num_params: int) -> None:
        self._program, self._num_params = program, num_params
        self.recordable: Recordable | None = program.recordable

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute from the codes ``x``."""
        first = len(params) - self._num_params
        operands = Orientations(Operand(x, *params[:first]), Operand(None, None, None))  # type: ignore[arg-type]  # left out
        return self._program.forward(Handover(operands, x.shape[0]), params[first:], call)
