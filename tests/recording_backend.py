"""A backend that computes as the reference does, and records runs: a plug-in.

A run is recorded as the operations of the backend that it consists of, the operators of torch in
between, and the functions that are called in it. They are called again one after the other, on
other tensors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from fp8core.backend_api import (
    API_VERSION,
    BackendSpec,
    NormBackwardDesc,
    OpDesc,
    Recording,
    hookimpl,
)
from fp8core.dispatch import plugins
from fp8core_backends.reference.backend import ReferenceBackend
from tests.overlapping_backend import Backend as OverlappingBackend

NAME, OVERLAPPING_NAME = "recording", "recording_overlapping"


@hookimpl
def fp8core_register_backends(register: Callable[[BackendSpec], None]) -> None:
    for name, kind in ((NAME, "Backend"), (OVERLAPPING_NAME, "Overlapping")):
        register(
            BackendSpec(
                name=name,
                device_types=("cpu",),
                factory=f"tests.recording_backend:{kind}",
                priority=-1,
                api_version=API_VERSION,
                operand_fields=("row_scaled", "four_over_six", "scale_max"),
            )
        )


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the backends to those of the plug-ins, until the test ends."""
    specs: list[BackendSpec] = []
    fp8core_register_backends(specs.append)
    for spec in specs:
        monkeypatch.setitem(plugins.load().backends, spec.name, spec)


class _Number(NamedTuple):
    """Stands for the tensor of that number."""

    number: int


class _Step(NamedTuple):
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: Sequence[int]


class Log(TorchDispatchMode):
    """The steps of a run. Its tensors are kept, so that none is taken for another one."""

    def __init__(self, given: Sequence[torch.Tensor | None]) -> None:
        super().__init__()
        self.tensors = list(given)
        self.steps: list[_Step] = []
        self.problem: str | None = None

    def number_of(self, tensor: torch.Tensor) -> int:
        for number, one in enumerate(self.tensors):
            if one is tensor:
                return number
        self.problem = f"a tensor {list(tensor.shape)} from elsewhere"
        return -1

    def numbered(self, tree: Any) -> Any:
        def of(one: Any) -> Any:
            return _Number(self.number_of(one)) if isinstance(one, torch.Tensor) else one

        return tree_map(of, tree)

    def note(self, function: Callable[..., Any], args: Any, kwargs: Any, results: Any) -> None:
        numbers = []
        for one in tree_leaves(results):
            if isinstance(one, torch.Tensor):
                self.tensors.append(one)
                numbers.append(len(self.tensors) - 1)
            elif one is not None:
                self.problem = f"{function} returned {one!r}"
        self.steps.append(_Step(function, args, kwargs, numbers))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        keywords = kwargs or {}
        given = self.numbered(args), self.numbered(keywords)
        results = func(*args, **keywords)
        self.note(func, *given, results)
        return results


class Program:
    """What repeats a run."""

    def __init__(self, log: Log, counts: Sequence[int], constants: Any, results: Any) -> None:
        self.num_leading, self.num_saved = counts
        self.constants = constants
        self.steps = log.steps
        self.results = [None if one is None else log.number_of(one) for one in results]
        self.num_tensors = len(log.tensors)

    def __call__(
        self, leading: tuple[torch.Tensor, ...], saved: list[torch.Tensor | None] | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        tensors: list[Any] = [*leading, *(saved or ()), *self.constants]
        tensors += [None] * (self.num_tensors - len(tensors))

        def of(one: Any) -> Any:
            return tensors[one.number] if isinstance(one, _Number) else one

        for function, args, kwargs, numbers in self.steps:
            given = (tree_map(of, tree, is_leaf=_is_number) for tree in (args, kwargs))
            positional, keywords = given
            leaves = tree_leaves(function(*positional, **keywords))
            found = [one for one in leaves if one is not None]
            for number, one in zip(numbers, found, strict=True):
                tensors[number] = one
        if saved is not None:
            saved.clear()
        return tuple(None if number is None else tensors[number] for number in self.results)


def _is_number(one: Any) -> bool:
    return isinstance(one, _Number)


class Recorder:
    def __init__(self) -> None:
        self.logs: dict[int, Log] = {}
        self.problems: list[str] = []

    def record(
        self,
        run: Callable[[], Sequence[torch.Tensor | None]],
        leading: Sequence[torch.Tensor],
        saved: Sequence[torch.Tensor | None] = (),
        constants: Sequence[torch.Tensor] = (),
    ) -> Recording:
        log, counts = Log([*leading, *saved, *constants]), (len(leading), len(saved))
        self.logs[threading.get_ident()] = log
        try:
            with log:
                results = run()
        finally:
            del self.logs[threading.get_ident()]
        program = Program(log, counts, constants, results)
        if log.problem is not None:
            self.problems.append(log.problem)
        return Recording(results, None if log.problem else program)

    def call(self, function: Callable[..., Any], *tensors: Any, **keywords: Any) -> Any:
        thread = threading.get_ident()
        log = self.logs.pop(thread)  # what the function calls is part of the function
        try:
            given = log.numbered(tensors), log.numbered(keywords)
            with _disable_current_modes():
                result = function(*tensors, **keywords)
        finally:
            self.logs[thread] = log
        log.note(function, *given, result)
        return result


RECORDER = Recorder()


class Operation:
    """A bound operation, which is noted where a run is recorded."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        if threading.get_ident() in RECORDER.logs:
            return RECORDER.call(self._run, *args, **keywords)
        return self._run(*args, **keywords)


class Backend(ReferenceBackend):
    """The reference, and the gradients of a norm with another one added."""

    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        plain = replace(desc, added=False) if isinstance(desc, NormBackwardDesc) else desc
        return super().unsupported(plain, device)

    def bind(self, desc: OpDesc, device: torch.device) -> Operation:
        run = super().bind(desc, device)

        def adding(*arguments: Any, added: Any) -> Any:
            grad_x, *rest = run(*arguments)
            return grad_x + added, *rest

        is_adding = isinstance(desc, NormBackwardDesc) and desc.added
        return Operation(adding if is_adding else run)

    def recorder(self, desc: OpDesc, device: torch.device) -> Recorder:
        return RECORDER


class Overlapping(OverlappingBackend):
    def bind(self, desc: OpDesc, device: torch.device) -> Operation:
        return Operation(super().bind(desc, device))

    def recorder(self, desc: OpDesc, device: torch.device) -> Recorder:
        return RECORDER
