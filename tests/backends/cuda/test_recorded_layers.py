"""Layers in the device's recorder, on a CPU: native calls say which addresses they are given, and
compute nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo import compiled_autograd

import fp8core
from fp8core.backend_api import AttentionBackwardDesc, AttentionDesc, OpDesc
from fp8core.chain import series
from fp8core.chain.repeated import Repeated
from fp8core.dispatch import table
from fp8core.recipe import Float8CurrentScaling, WeightOnly
from fp8core_backends.cuda import memory, recorder
from fp8core_backends.cuda.gemm import FEW_ROWS, LowPrecisionGemm
from tests.backends.cuda import test_recorder
from tests.benchmarks import host_of_model, host_path
from tests.benchmarks.model_gpu.weights import Shape
from tests.conversion.test_siblings import WIDTH, attention, rows

pytest.importorskip("transformers")
_empty = torch._C._dynamo.guards._empty_strided_cpu  # type: ignore[attr-defined]


class Program(test_recorder.Program):
    """Allocates, calls functions of torch and returns as a native program."""

    def __call__(
        self, leading: Sequence[torch.Tensor], saved: list[Any] | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        constants = [values[0] for kind, *values in self.added if kind == "constant"]
        tensors: dict[int, Any] = dict(enumerate((*leading, *(saved or ()), *constants)))
        results = []
        for kind, *values in self.added:
            if kind == "empty":
                tensors[values[0]] = _empty(*values[1:])
            elif kind == "call":
                created, function, arguments, numbers, keywords = values
                pairs = zip(arguments, numbers, strict=True)
                passed = [tensors[number] if number >= 0 else plain for plain, number in pairs]
                tensors[created] = function(*passed, **keywords)
            elif kind == "result":
                results.append(tensors.get(values[0]))
            elif kind == "view":
                results.append(tensors[values[0]].as_strided(*values[1:]))
        if saved is not None:
            saved.clear()
        return tuple(results)


class Library(test_recorder.Library):
    """Hands on what native calls of the stubbed library are given."""

    Program = Program

    def listening(self, listen: Callable[[Any], None], run: Callable[[], Any]) -> Any:
        try:
            return super().listening(listen, run)
        finally:
            self.listen = None

    def heard(self, *arguments: Any) -> int:
        if self.listen is not None:
            self.launch(*(one for one in _numbers(arguments) if one > 1 << 32))
        return 0


def _numbers(values: Any) -> Iterator[int]:
    for value in values:
        if isinstance(value, tuple | list):
            yield from _numbers(value)
        elif type(value) is int:
            yield value


def test_products_of_torch_are_computed_again_where_they_are_due(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are written into parts of one tensor, as by linear layers that share their input."""
    monkeypatch.setattr(memory, "_empty_here", _empty)
    monkeypatch.setattr(memory, "_current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    torch.manual_seed(0)
    given = [torch.randn(3, 16), torch.randn(8, 16), torch.randn(8)]

    def products(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> list[torch.Tensor]:
        joined = memory.allocator(0)((3, 24), (24, 1), torch.float32)
        torch.mm(x, weight.t(), out=joined[:, :8])
        torch.addmm(bias, x, weight.t(), out=joined[:, 8:16])
        joined_again = torch.addmm(bias, x, weight.t())
        torch.mm(joined_again, weight[:, :8].t(), out=joined[:, 16:])
        return [joined, torch.mm(x, weight.t())]

    one = recorder.Recorder(0, Library())
    repeat: Any = one.record(lambda: products(*given), given).repeat
    assert one.problem is None
    for _ in range(2):
        given = [torch.randn_like(each) for each in given]
        for computed, expected in zip(repeat(given), products(*given), strict=True):
            torch.testing.assert_close(computed, expected, rtol=0, atol=0)


@contextmanager
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The problems of the runs that a recorder has recorded."""
    problems: list[str] = []
    library = Library()
    with ExitStack() as stack:
        host_of_model.without_a_device(stack)
        table.forget()  # what other tests have bound, and in the end what this one has
        stack.callback(table.forget)
        one = recorder.Recorder(0, library)
        record = recorder.Recorder.record

        def noting(self: Any, *arguments: Any) -> Any:
            recorded = record(self, *arguments)
            problems.append(self.problem or "")
            return recorded

        def recorder_of(self: Any, desc: OpDesc, device: torch.device) -> Any:
            is_of_torch = isinstance(desc, AttentionDesc | AttentionBackwardDesc)
            return None if is_of_torch else one

        monkeypatch.setattr(recorder.Recorder, "record", noting)
        monkeypatch.setattr(host_of_model.RecordingBackend, "recorder", recorder_of)
        for owner, name in ((host_path.Cast, "whole"), (host_path.Gemm, "run")):
            monkeypatch.setattr(owner, name, staticmethod(library.heard))
        monkeypatch.setattr(host_path.Cast, "__call__", lambda self, *each: library.heard(*each))
        monkeypatch.setattr(host_path.Kind, "__getattr__", lambda self, name: library.heard)
        yield problems


def check_weight_only() -> None:
    """Raise AssertionError unless a decoder with quantized weights alone is recorded, for more rows
    than the kernel of few rows takes: its weights are decoded, and torch multiplies."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    model = LlamaForCausalLM._from_config(LlamaConfig(**sizes, **heads), dtype=torch.bfloat16)
    tokens = torch.arange(FEW_ROWS + 1)[None] % 64
    with pytest.MonkeyPatch.context() as monkeypatch, recording(monkeypatch) as problems:
        fp8core.quantize_(model.eval(), WeightOnly("rowwise"))
        with torch.no_grad():
            for _ in range(4):
                model(tokens, use_cache=False)
        assert problems == ["", ""], problems


def check_compiled_backward() -> None:
    """Raise AssertionError if compiled autograd looks into a product of the native library."""
    calls: list[bool] = []
    run = LowPrecisionGemm.__call__

    def noting(self: LowPrecisionGemm, a: Any, b: Any, **given: Any) -> torch.Tensor:
        calls.append(torch.compiler.is_compiling())
        return run(self, a, b, **given)

    with pytest.MonkeyPatch.context() as monkeypatch, recording(monkeypatch):
        monkeypatch.setattr(LowPrecisionGemm, "__call__", noting)
        layer = fp8core.Linear(WIDTH, WIDTH)
        with fp8core.autocast(recipe=Float8CurrentScaling()):
            alone = layer(rows(0).requires_grad_())
        model = attention()  # whose linears share the cast of their input
        for seed in range(5):
            shared = model(rows(seed).requires_grad_() * 2)
        calls.clear()
        with compiled_autograd._enable(torch.compile(backend="aot_eager")):
            (alone.sum() + shared.sum()).backward()
        assert calls == [False] * 10, calls


def check(kind: str, recipe: str) -> None:
    """Raise AssertionError unless a layer's forward and backward are recorded, and repeated."""
    with pytest.MonkeyPatch.context() as monkeypatch, recording(monkeypatch) as problems:
        monkeypatch.setattr(host_of_model, "SHAPE", Shape(64, 128, 4, 2, 2, 64))
        for name, size in (("ROWS", 8), ("LENGTH", 32)):  # more than the few that lie apart
            monkeypatch.setattr(host_of_model, name, size)
        programs: list[Repeated] = []

        def repeated(*arguments: Any) -> Repeated:
            programs.append(Repeated(*arguments))
            return programs[-1]

        monkeypatch.setattr(series, "Repeated", repeated)
        step = host_of_model.of_model(f"{kind} {recipe}")
        for _ in range(3):
            step()
        assert problems == [""] * 4, problems
        are_recorded = [each.is_recorded for each in programs]
        assert are_recorded == [(True, True)] * 2, are_recorded
        step()
        assert len(problems) == 4, problems


def test_both_directions_of_a_layer_are_recorded() -> None:
    """In a process of its own: layers that modules keep for all calls, as that of rotations, stay
    bound to what stands for a device."""
    kinds, recipes = ("fp8core", "converted"), ("delayed", "current", "block")
    calls = [f"check({kind!r}, {recipe!r})" for kind in kinds for recipe in recipes]
    calls = "; ".join([*calls, "check_weight_only()", "check_compiled_backward()"])
    code = f"from {__name__} import *; {calls}"
    command = [sys.executable, "-c", code]
    root = Path(__file__).parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
