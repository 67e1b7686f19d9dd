"""Resolved operations: bound once, looked up by value, and run without any dispatch."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import pluggy
import pytest
import torch

import fp8core
from fp8core.backend_api import (
    Alignment,
    DequantizeDesc,
    GemmDesc,
    OpDesc,
    OperandSpec,
    QuantizeDesc,
)
from fp8core.dispatch import plugins, policy, select, settings, table
from fp8core.errors import RecipeError
from tests.dispatch import toys
from tests.dispatch.toys import CPU


def equal_gemm() -> GemmDesc:
    """A descriptor equal to ``toys.GEMM``, and another object."""
    spec = OperandSpec("e4m3", (0, 0), 448.0)
    return GemmDesc(spec, spec, torch.bfloat16)


def test_equal_descriptors_give_the_same_object() -> None:
    assert table.resolve(equal_gemm(), CPU) is table.resolve(toys.GEMM, torch.device("cpu"))


def test_other_descriptor_gives_another_object() -> None:
    assert table.resolve(toys.GEMM, CPU) is not table.resolve(toys.PLAIN_GEMM, CPU)


def test_grouped_descriptor_is_not_taken_for_the_dense_one() -> None:
    assert table.resolve(toys.GROUPED_GEMM, CPU).choice.desc.op == "grouped_gemm"


def test_equal_policy_gives_the_same_object() -> None:
    with fp8core.use_backend("reference"):
        first = table.resolve(toys.GEMM, CPU)
    with fp8core.use_backend("reference"):
        assert table.resolve(toys.GEMM, CPU) is first


def test_other_policy_resolves_anew() -> None:
    toys.register(toys.backend("toy"))
    with fp8core.use_backend("reference"):
        first = table.resolve(toys.GEMM, CPU)
    assert (first.choice.backend, table.resolve(toys.GEMM, CPU).choice.backend) == (
        "reference",
        "toy",
    )


def test_other_environment_resolves_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    toys.register(toys.backend("toy"))
    first = table.resolve(toys.GEMM, CPU)
    monkeypatch.setenv("FP8CORE_BACKEND", "reference")
    assert (first.choice.backend, table.resolve(toys.GEMM, CPU).choice.backend) == (
        "toy",
        "reference",
    )


def test_reload_resolves_anew() -> None:
    toys.register(toys.backend("toy"))
    assert table.resolve(toys.GEMM, CPU).choice.backend == "toy"
    plugins.reload()
    assert table.resolve(toys.GEMM, CPU).choice.backend == "reference"


def test_refusal_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8CORE_BACKEND", "nobody")
    with pytest.raises(RecipeError):
        table.resolve(toys.GEMM, CPU)
    monkeypatch.delenv("FP8CORE_BACKEND")
    assert table.resolve(toys.GEMM, CPU).choice.backend == "reference"


def test_alignment_is_the_backends() -> None:
    spec = OperandSpec("e4m3", (1, 32), 448.0, scale_format="e8m0")
    resolved = table.resolve(GemmDesc(spec, spec, torch.bfloat16), CPU)
    assert resolved.alignment == Alignment(k=32)


def test_operation_other_than_a_gemm_has_no_alignment() -> None:
    assert table.resolve(toys.QUANTIZE, CPU).alignment == Alignment()


def test_backend_that_fails_while_it_runs_is_not_substituted() -> None:
    def bind(backend: object, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        def run(*args: object) -> NoReturn:
            raise ArithmeticError("the kernel failed")

        return run

    toys.register(toys.backend("toy"))
    instance = plugins.load().instance(plugins.load().backends["toy"])
    instance.bind = bind.__get__(instance)  # type: ignore[method-assign]
    with pytest.raises(ArithmeticError, match="the kernel failed"):
        table.resolve(toys.AMAX, CPU).run(torch.ones(4, dtype=torch.bfloat16))


class Untouchable(dict[str, str]):
    """An environment that must not be looked at."""

    def __getitem__(self, name: str) -> str:
        raise AssertionError(f"the environment was read: {name}")

    def get(self, name: str, default: object = None) -> NoReturn:  # type: ignore[override]
        raise AssertionError(f"the environment was read: {name}")

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("the environment was listed")


def refuse(*args: object, **kwargs: object) -> NoReturn:
    raise AssertionError("dispatched in the hot path")


@contextlib.contextmanager
def no_dispatch() -> Iterator[None]:
    """Make any look at the environment, a hook or the registry of plug-ins fail."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "environ", Untouchable())
        patch.setattr(pluggy.HookCaller, "__call__", refuse)
        patch.setattr(plugins, "load", refuse)
        patch.setattr(settings, "read", refuse)
        patch.setattr(select, "choose", refuse)
        patch.setattr(table, "resolve", refuse)
        yield


@pytest.mark.parametrize(
    "look",
    [
        lambda: os.environ.get("FP8CORE_BACKEND"),
        lambda: os.environ["FP8CORE_BACKEND"],
        lambda: fp8core.use_backend("reference"),
        lambda: fp8core.get_default_recipe(),
    ],
    ids=["get", "item", "use_backend", "default_recipe"],
)
def test_guard_of_the_hot_path_catches(look: Callable[[], object]) -> None:
    with no_dispatch(), pytest.raises(AssertionError):
        look()


def test_resolved_operations_run_without_dispatch() -> None:
    row = OperandSpec("e4m3", (1, 0), 448.0)
    quantize = table.resolve(QuantizeDesc(torch.bfloat16, row, row), CPU).run
    gemm = table.resolve(GemmDesc(row, row, torch.bfloat16), CPU).run
    dequantize = table.resolve(DequantizeDesc(row), CPU).run
    amax = table.resolve(toys.AMAX, CPU).run
    x = torch.randn(8, 16, dtype=torch.bfloat16)
    with no_dispatch():
        operand = quantize(x).rowwise
        y, values, largest = gemm(operand, operand), dequantize(operand), amax(x)
    assert (y.shape, values.shape, largest.shape) == ((8, 8), (8, 16), (1,))


@pytest.mark.parametrize("name", ["current", "mxfp8", "block", "nvfp4", "rowwise"])
def test_bound_layer_trains_without_dispatch(name: str) -> None:
    layer = fp8core.Linear(32, 32)
    x = torch.randn(32, 32, requires_grad=True)
    with fp8core.autocast(recipe=fp8core.recipe.by_name(name)):
        layer(x).sum().backward()
        with no_dispatch():
            layer(x).sum().backward()


def test_bound_layer_with_delayed_scaling_runs_forward_without_dispatch() -> None:
    layer = fp8core.Linear(32, 32)
    x = torch.randn(32, 32)
    with fp8core.autocast(recipe=fp8core.recipe.DelayedScaling()):
        layer(x)
        with no_dispatch():
            layer(x)


def test_backward_uses_what_was_chosen_in_forward() -> None:
    calls: list[str] = []
    toys.register(toys.backend("toy", calls=calls, priority=-1))
    layer = fp8core.Linear(32, 32)
    with fp8core.use_backend("toy"), fp8core.autocast():
        y = layer(torch.randn(32, 32, requires_grad=True))
    calls.clear()
    y.sum().backward()
    assert calls.count("gemm") == 2


def test_layer_follows_the_policy_of_its_call() -> None:
    calls: list[str] = []
    toys.register(toys.backend("toy", calls=calls, priority=-1))
    layer = fp8core.Linear(32, 32)
    x = torch.randn(32, 32)
    for backend, expected in (("reference", 0), ("toy", 1), ("reference", 0), ("toy", 1)):
        calls.clear()
        with fp8core.use_backend(backend), fp8core.autocast():
            layer(x)
        assert calls.count("gemm") == expected


def test_many_threads_may_resolve_at_once(caplog: pytest.LogCaptureFixture) -> None:
    found: list[str] = []

    def work() -> None:
        found.append(table.resolve(toys.QUANTIZE, toys.CUDA).choice.backend)

    threads = [threading.Thread(target=work) for _ in range(8)]
    with caplog.at_level(logging.WARNING, logger="fp8core"):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == ["reference"] * 8
    assert len(caplog.messages) == 1


def test_default_recipe_is_what_the_selected_backend_runs_best() -> None:
    toys.register(toys.backend("toy", preferred_recipe="mxfp8", priority=-1))
    with fp8core.use_backend("toy"):
        assert fp8core.get_default_recipe() == fp8core.recipe.MXFP8BlockScaling()
    assert fp8core.get_default_recipe() == fp8core.recipe.Float8CurrentScaling()


def test_autocast_without_a_recipe_takes_the_default_one() -> None:
    toys.register(toys.backend("toy", preferred_recipe="rowwise", priority=-1))
    with fp8core.use_backend("toy"), fp8core.autocast():
        layer = fp8core.Linear(32, 32)
        layer(torch.randn(32, 32))
    assert "Float8RowwiseScaling on toy" in repr(layer)


def test_policy_of_the_thread_is_untouched_by_resolving() -> None:
    table.resolve(toys.GEMM, CPU, backend="reference")
    assert policy.current() == policy.NO_POLICY
