"""The links of a chain, and the programs that they have given."""

from __future__ import annotations

from collections.abc import Sequence

from fp8core.backend_api import Recorder
from fp8core.chain.call import DENSE, Call
from fp8core.chain.protocol import Link, Program
from fp8core.chain.repeated import Repeated, records
from fp8core.chain.series import Series
from fp8core.torch_ops.likeness import Likeness

_MOST_PROGRAMS = 64


class Arranged(tuple[Link, ...]):
    """Links that run one after the other.

    ``like_grad`` says whether the gradient of the output is like one that needed no conversion.
    ``recorder`` records dense calls, if all operations of the links have the same one.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self.like_grad: Likeness | None = None
        self.recorder: Recorder | None = None
        self._programs: dict[tuple[Sequence[int], Sequence[bool]], Program] = {}

    def program(
        self, shape: Sequence[int], rows: int, needs_grad: tuple[bool, ...], call: Call
    ) -> Program:
        """Return the program of all links for an input of ``shape``, which has ``rows`` rows; the
        other arguments are as of ``Link.program``.

        That of a call that brings nothing besides its tensors is the same each time.
        """
        if call is not DENSE or type(rows) is not int or type(shape[-1]) is not int:
            return self._new_program(shape, rows, needs_grad, call)  # symbols, while torch traces
        key = shape, needs_grad
        program = self._programs.get(key)
        if program is None:
            program = self._new_program(shape, rows, needs_grad, call)
            recorder = self.recorder
            recordable = None if recorder is None else program.recordable
            if recorder is not None and recordable and records(recorder, recordable):
                program = Repeated(program, recordable, recorder)
            if len(self._programs) >= _MOST_PROGRAMS:  # ragged sizes without end
                self._programs.pop(next(iter(self._programs)), None)
            self._programs[key] = program
        return program

    def _new_program(
        self, shape: Sequence[int], rows: int, needs_grad: Sequence[bool], call: Call
    ) -> Program:
        for link in self:
            link.compare(shape, needs_grad)
        if len(self) == 1:
            return self[0].program(rows, needs_grad, call)
        return Series(self, rows, needs_grad, call)
