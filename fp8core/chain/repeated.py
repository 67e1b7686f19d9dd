"""A program that a backend records once, and then runs in one call each way.

The program itself stays what defines the results: it runs for the first calls, while it is
recorded, and whenever a call differs from the recorded one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fp8core.backend_api import Recorder, Repeat
from fp8core.chain.call import Call
from fp8core.chain.protocol import (
    Backward,
    Forward,
    Out,
    Params,
    Program,
    Recordable,
    SavedList,
    Wrapper,
)
from fp8core.chain.unwrap import PLAIN
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.saving import is_noting
from fp8core.tensors.scaling import update_all_after_backward
from fp8core.torch_ops.repeats import Likeness, recording, sameness_to

_FIRST = 1
"""Calls that run before one is recorded: the first one of a size chooses algorithms."""

_ATTEMPTS = 4
"""Calls that are recorded before a direction counts as one that cannot be repeated."""


class _Direction:
    """Forward or backward of a program: its recorded run, once there is one."""

    __slots__ = ("_attempts_left", "_before", "_recorder", "is_same", "repeat")

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._before = _FIRST
        self._attempts_left = _ATTEMPTS
        self.is_same: Likeness | None = None
        self.repeat: Repeat | None = None

    def is_due(self) -> bool:
        """Whether the call that is about to run is one to record."""
        if self._before:
            self._before -= 1
            return False
        return self._attempts_left > 0

    def record(
        self,
        run: Any,
        leading: Sequence[torch.Tensor],
        saved: SavedList,
        constants: Sequence[torch.Tensor],
    ) -> None:
        """Call ``run``, which takes no arguments, and keep what repeats it, if anything does."""
        self._attempts_left -= 1
        is_same = sameness_to([*leading, *(tensor for tensor in saved if tensor is not None)])
        with recording(self._recorder):
            _, repeat = self._recorder.record(run, leading, saved, constants)
        if is_same is not None:
            self.is_same, self.repeat = is_same, repeat


class Repeated(Wrapper):
    """Around a program that is ``recordable``; ``recorder`` records its operations.

    It is for dense calls of one number of rows.
    """

    __slots__ = (
        *("_backward", "_constants", "_context", "_forward", "_is_stored", "_num_leading"),
        *("_states", "recordable"),
    )

    def __init__(self, inner: Program, recordable: Recordable, recorder: Recorder) -> None:
        super().__init__(inner, inner.input_request)
        self.recordable: Recordable | None = recordable
        self._constants, self._states = recordable.constants, recordable.backward_states
        self._forward, self._backward = _Direction(recorder), _Direction(recorder)
        self._context: object = None  # of the recorded forward
        # Whether it reads weights that are stored quantized, and how many tensors it is given.
        self._is_stored, self._num_leading = False, 0

    @property
    def is_recorded(self) -> tuple[bool, bool]:
        """Whether there is a recorded run of forward, and of backward."""
        return self._forward.repeat is not None, self._backward.repeat is not None

    @property
    def program(self) -> Program:
        """The program itself."""
        return self._inner

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute as the program does."""
        if is_noting():  # a recorded run does not say which of the saved tensors are weights
            return self._inner.forward(x, params, call, out)
        direction = self._forward
        repeat, is_same = direction.repeat, direction.is_same
        if out is None and repeat is not None and is_same is not None:
            leading = (x, *(_of_stored(params) if self._is_stored else params))
            if len(leading) == self._num_leading and is_same(*leading):
                results = repeat(leading)
                if results is not None:
                    y, *saved = results
                    return y, saved, self._context
        elif out is None:
            leading = (x, *_of_stored(params))
            if PLAIN.issuperset(map(type, leading)) and direction.is_due():
                self._is_stored = len(leading) > 1 + len(params)
                self._num_leading = len(leading)
                return self._record_forward(x, params, call, leading)
        return self._inner.forward(x, params, call, out)

    def _record_forward(
        self, x: torch.Tensor, params: Params, call: Call, leading: Sequence[torch.Tensor]
    ) -> Forward:
        computed: list[Forward] = []

        def run() -> Sequence[torch.Tensor | None]:
            computed.append(self._inner.forward(x, params, call))
            y, saved, _ = computed[0]
            return (y, *saved)

        self._forward.record(run, leading, [], self._constants)
        context = computed[0][2]
        if _is_constant(context):
            self._context = context
        else:
            self._forward.repeat = None
        return computed[0]

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Compute as the program does; that the backward states are updated is seen to first."""
        direction = self._backward
        repeat, is_same = direction.repeat, direction.is_same
        if out is None and context is self._context and type(grad) is torch.Tensor:
            if self._states:
                update_all_after_backward(self._states, call.backward_pass)
            if repeat is None:
                if direction.is_due():
                    return self._record_backward(grad, saved, context, call)
            elif is_same is not None and is_same(grad, *[o for o in saved if o is not None]):
                results = repeat((grad,), saved)
                if results is not None:
                    return results
        return self._inner.backward(grad, saved, context, call, out)

    def _record_backward(
        self, grad: torch.Tensor, saved: SavedList, context: Any, call: Call
    ) -> Backward:
        computed: list[Backward] = []

        def run() -> Sequence[torch.Tensor | None]:
            computed.append(self._inner.backward(grad, saved, context, call))
            return computed[0]

        self._backward.record(run, (grad,), saved, self._constants)
        return computed[0]


def _of_stored(params: Params) -> Sequence[Any]:
    """Return ``params`` with the tensors of a stored weight in its place: a recorded run reads
    those, and saves views of them."""
    if QuantizedTensor not in map(type, params):
        return params
    tensors: list[Any] = []
    for param in params:
        tensors += param.tensors() if type(param) is QuantizedTensor else (param,)
    return tensors


def _is_constant(context: object) -> bool:
    """Say whether a forward's context has no tensors, and so is the same in each call."""
    if isinstance(context, list | tuple):
        return all(map(_is_constant, context))
    return context is None or isinstance(context, int)


def unrecorded(program: Program) -> Program:
    """Return the program itself, which torch can look into."""
    return program.program if isinstance(program, Repeated) else program
