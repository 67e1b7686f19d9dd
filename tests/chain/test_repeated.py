"""When a recorded run takes a program's place, and when the program computes itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from fp8core.backend_api import Recording
from fp8core.chain.call import DENSE
from fp8core.chain.protocol import Backward, Forward, Program, Recordable, SavedList, TensorProgram
from fp8core.chain.repeated import Repeated, unrecorded
from fp8core.tensors.delayed_state import DelayedState
from fp8core.torch_ops.private import current_backward_pass
from fp8core.torch_ops.repeats import called_in_repeats

X, WEIGHT, GRAD = torch.ones(4, 8), torch.full((8,), 3.0), torch.ones(4, 8)


class Scale(TensorProgram[None]):
    """``y = w x``; counts its calls."""

    def __init__(self, context: Callable[[], object] = lambda: None) -> None:
        super().__init__(None, (True, True))
        self.num_forward = self.num_backward = 0
        self.context = context

    def forward(self, x: Any, params: Any, call: Any, out: Any = None) -> Forward:
        self.num_forward += 1
        y: Any = x * params[0]
        return y if out is None else out(y), (x, None, params[0]), self.context()

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Any, out: Any = None
    ) -> Backward:
        self.num_backward += 1
        x, _, weight = saved
        assert x is not None
        saved.clear()
        return grad * weight, (grad * x).sum(0)


class Recorder:
    """Repeats by a function that it is given, and keeps what it was asked to record."""

    def __init__(self, repeat: Any) -> None:
        self.repeat = repeat
        self.num_recorded = 0
        self.functions: list[Any] = []
        self.constants: Sequence[torch.Tensor] = ()

    def record(
        self,
        run: Callable[[], Sequence[torch.Tensor | None]],
        leading: Sequence[torch.Tensor],
        saved: Sequence[torch.Tensor | None] = (),
        constants: Sequence[torch.Tensor] = (),
    ) -> Recording:
        self.num_recorded += 1
        self.constants = constants
        return Recording(run(), self.repeat)

    def call(self, function: Any, *tensors: torch.Tensor) -> Any:
        self.functions.append(function)
        return function(*tensors)


def repeated(leading: tuple[torch.Tensor, ...], saved: Any = None) -> Any:
    """Stand for the recorded runs of both directions, with results that tell them apart."""
    if saved is not None:
        saved.clear()
        return torch.full((4, 8), 50.0), torch.full((8,), 60.0)
    return torch.full((4, 8), 70.0), leading[0], None, leading[1]


def forward(program: Program, x: torch.Tensor = X, times: int = 1) -> Forward:
    for _ in range(times):
        result = program.forward(x, (WEIGHT,), DENSE)
    return result


def backward(program: Program, context: object = None, grad: torch.Tensor = GRAD) -> Backward:
    return program.backward(grad, [X, None, WEIGHT], context, DENSE)


def test_the_second_call_is_recorded_and_the_third_repeated() -> None:
    program, recorder, constant = Scale(), Recorder(repeated), torch.zeros(1)
    chain = Repeated(program, Recordable((constant,)), recorder)
    assert [forward(chain)[0][0, 0].item() for _ in range(4)] == [3.0, 3.0, 70.0, 70.0]
    assert [backward(chain)[0][0, 0].item() for _ in range(4)] == [3.0, 3.0, 50.0, 50.0]
    assert (program.num_forward, program.num_backward, recorder.num_recorded) == (2, 2, 2)
    assert recorder.constants == (constant,)
    assert chain.is_recorded == (True, True)


def test_a_repeat_returns_what_the_program_would_save() -> None:
    chain = Repeated(Scale(), Recordable(), Recorder(repeated))
    expected, (_, saved, context) = forward(chain), forward(chain, times=2)
    assert list(saved) == list(expected[1])
    assert context == expected[2]


def test_another_tensor_is_computed_by_the_program() -> None:
    for x in [
        torch.ones(8, 8)[::2],
        torch.ones(5, 8),
        torch.ones(4, 8, dtype=torch.float64),
        WEIGHT,
    ]:
        chain = Repeated(Scale(), Recordable(), Recorder(repeated))
        forward(chain, times=3)
        assert forward(chain, x)[0].unique().item() in (3.0, 9.0), x
        assert forward(chain)[0][0, 0] == 70.0, x


def test_a_repeat_that_does_not_fit_leaves_the_call_to_the_program() -> None:
    chain = Repeated(Scale(), Recordable(), Recorder(lambda leading, saved=None: None))
    assert forward(chain, times=3)[0][0, 0] == 3.0
    assert [backward(chain)[0][0, 0].item() for _ in range(3)] == [3.0] * 3


def test_what_cannot_be_repeated_is_recorded_a_few_times_only() -> None:
    recorder = Recorder(None)
    chain = Repeated(Scale(), Recordable(), recorder)
    assert forward(chain, times=20)[0][0, 0] == 3.0
    assert recorder.num_recorded == 4


def test_a_context_with_a_tensor_is_never_repeated() -> None:
    chain = Repeated(Scale(lambda: [torch.ones(1)]), Recordable(), Recorder(repeated))
    _, _, context = forward(chain, times=4)
    assert isinstance(context, list)
    assert [backward(chain, context)[0][0, 0].item() for _ in range(4)] == [3.0] * 4
    assert chain.is_recorded == (False, False)


def test_the_context_of_an_earlier_forward_goes_to_the_program() -> None:
    chain = Repeated(Scale(lambda: [2, None]), Recordable(), Recorder(repeated))
    (_, _, before), (_, _, context) = forward(chain), forward(chain, times=2)
    assert [backward(chain, context)[0][0, 0].item() for _ in range(3)] == [3.0, 3.0, 50.0]
    assert backward(chain, before)[0][0, 0] == 3.0


def test_a_result_that_a_neighbour_asks_for_comes_from_the_program() -> None:
    chain = Repeated(Scale(), Recordable(), Recorder(repeated))
    forward(chain, times=3)
    request: Any = torch.neg
    assert chain.forward(X, (WEIGHT,), DENSE, request)[0][0, 0] == -3.0


def test_an_error_while_recording_is_the_program_s_own() -> None:
    chain = Repeated(Scale(), Recordable(), Recorder(repeated))
    forward(chain)
    with pytest.raises(RuntimeError, match="size of tensor"):
        chain.forward(X, (torch.ones(3),), DENSE)
    assert forward(chain, times=2)[0][0, 0] == 70.0


def test_backward_states_are_updated_though_the_program_does_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    updated: list[object] = []
    monkeypatch.setattr(
        "fp8core.chain.repeated.update_all_after_backward",
        lambda states, task: updated.extend(states),
    )
    state = DelayedState.__new__(DelayedState)
    chain = Repeated(Scale(), Recordable((), (state,)), Recorder(repeated))
    for _ in range(3):
        backward(chain)
    assert updated == [state] * 3
    assert current_backward_pass() == -1


def test_torch_is_shown_the_program_itself() -> None:
    program = Scale()
    assert unrecorded(Repeated(program, Recordable(), Recorder(repeated))) is program
    assert unrecorded(program) is program


def test_functions_of_a_run_go_to_its_recorder() -> None:
    class Calling(Scale):
        def forward(self, x: Any, params: Any, call: Any, out: Any = None) -> Forward:
            return super().forward(called_in_repeats(torch.clone, x), params, call, out)

    recorder = Recorder(repeated)
    chain = Repeated(Calling(), Recordable(), recorder)
    assert [forward(chain)[0][0, 0].item() for _ in range(3)] == [3.0, 3.0, 70.0]
    assert recorder.functions == [torch.clone]
