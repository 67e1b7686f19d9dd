"""Functions are handed to the recorder of their thread, and called as they are elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8core.torch_ops.repeats import called_in_repeats, recording

X = torch.ones(2)


class Recorder:
    """Keeps what it is handed."""

    def __init__(self) -> None:
        self.functions: list[Callable[..., torch.Tensor]] = []

    def record(self, *arguments: Any) -> Any:
        raise NotImplementedError

    def call(self, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        self.functions.append(function)
        return function(*tensors)


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def nested(x: torch.Tensor) -> torch.Tensor:
    return called_in_repeats(double, x)


def test_a_function_is_called_where_nothing_is_recorded() -> None:
    assert called_in_repeats(double, X).tolist() == [2, 2]


def test_a_function_is_handed_to_the_recorder() -> None:
    recorder = Recorder()
    with recording(recorder):
        assert called_in_repeats(double, X).tolist() == [2, 2]
        called_in_repeats(double, X)
    called_in_repeats(double, X)
    assert recorder.functions == [double, double]


def test_a_function_within_a_function_is_part_of_it() -> None:
    recorder = Recorder()
    with recording(recorder):
        called_in_repeats(nested, X)
        called_in_repeats(double, X)
    assert recorder.functions == [nested, double]


def test_another_thread_records_nothing() -> None:
    recorder = Recorder()
    with recording(recorder):
        thread = threading.Thread(target=called_in_repeats, args=(double, X))
        thread.start()
        thread.join()
    assert recorder.functions == []


def test_a_function_that_fails_leaves_the_recording() -> None:
    recorder = Recorder()
    with recording(recorder):
        with pytest.raises(TypeError):
            called_in_repeats(double, None)  # type: ignore[arg-type]
        called_in_repeats(double, X)
    assert len(recorder.functions) == 2
