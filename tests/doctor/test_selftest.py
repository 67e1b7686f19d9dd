"""The doctor's self-test: a sound backend passes, and each kind of wrong result is caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fp8core.backend_api import OPTIONAL_OPS, OpDesc, Operand, Quantized
from fp8core.conformance.laws import LAWS
from fp8core.dispatch import plugins
from fp8core.doctor import findings
from fp8core.doctor.findings import Check, needs_by_recipe
from fp8core_backends.reference.backend import ReferenceBackend
from tests.chain import fused_toy
from tests.dispatch import toys
from tests.pairs import turns

CPU = torch.device("cpu")
REFERENCE = ReferenceBackend()


pytestmark = pytest.mark.usefixtures("isolated")


with toys.isolation():
    NEEDS = needs_by_recipe()  # of the recipes that no plug-in brings


def check(name: str, op: str) -> Check | None:
    """The test of ``op`` of the backend ``name``, on the CPU."""
    return findings.check(plugins.load().backends[name], op, CPU, NEEDS)


def spoiled(spoil: Callable[[OpDesc, Any], Any], op: str) -> Check:
    """The test of ``op`` of a backend whose results go through ``spoil``."""

    def bind(self: toys.ToyBackend, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        run = REFERENCE.bind(desc, device)
        if desc.op != op:
            return run
        return lambda *args, **kwargs: spoil(desc, run(*args, **kwargs))

    toys.register(toys.backend("toy", bind=bind))
    found = check("toy", op)
    assert found is not None
    return found


def unchanged(desc: OpDesc, result: Any) -> Any:
    return result


@pytest.mark.parametrize("op", ["gemm", "attention_backward", "adam"])
def test_backend_that_computes_as_the_reference_passes(op: str) -> None:
    found = spoiled(unchanged, op)
    assert found.failure is None
    assert found.cases > 0


def test_quantize_of_another_backend_is_compared_bit_for_bit() -> None:
    found = spoiled(unchanged, "quantize")
    assert (found.worst, found.judged_by) == (
        0.0,
        LAWS["quantize_codes_equal_the_reference"].meaning,
    )


@pytest.mark.parametrize(
    ("op", "factor"),
    turns(
        ["gemm", "norm", "norm_backward", "activation", "dequantize", "gemm"],
        [1.5, 0.0, float("nan")],
    ),
)
def test_wrong_values_are_caught(op: str, factor: float) -> None:
    def spoil(desc: OpDesc, result: Any) -> Any:
        parts = (result,) if isinstance(result, torch.Tensor) else result
        wrong = parts[0] * factor
        return wrong if isinstance(result, torch.Tensor) else (wrong, *parts[1:])

    assert spoiled(spoil, op).failure is not None


def test_gemm_of_another_shape_is_caught() -> None:
    assert spoiled(lambda desc, result: result[:1], "gemm").failure is not None


def test_groups_in_another_order_are_caught() -> None:
    def spoil(desc: OpDesc, result: Any) -> Any:
        return result.flip(0) if isinstance(result, torch.Tensor) else result[::-1]

    assert spoiled(spoil, "grouped_gemm").failure is not None


def test_amax_that_is_close_is_caught() -> None:
    assert spoiled(lambda desc, result: result * 1.01, "amax").failure is not None


def test_scale_update_that_forgets_is_caught() -> None:
    def bind(self: toys.ToyBackend, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        return lambda *args: None

    toys.register(toys.backend("toy", bind=bind))
    found = check("toy", "scale_update")
    assert found is not None
    assert found.failure is not None


@pytest.mark.parametrize("by", [1, 24])
def test_codes_that_stand_for_other_values_are_caught(by: int) -> None:
    assert spoiled(lambda desc, result: shifted(result, by), "quantize").failure is not None


def shifted(made: Quantized, by: int) -> Quantized:
    def shift(operand: Operand | None) -> Operand | None:
        return None if operand is None else operand._replace(data=operand.data ^ by)

    return Quantized(shift(made.rowwise), shift(made.columnwise))


def test_operation_that_raises_is_a_failure_with_the_descriptor() -> None:
    def spoil(desc: OpDesc, result: Any) -> Any:
        raise OSError("no kernel image")

    found = spoiled(spoil, "scale_update")
    assert found.failure == "ScaleUpdateDesc(max): OSError: no kernel image"


def test_operation_that_is_not_supported_is_not_tested() -> None:
    toys.register(toys.backend("toy", refuse=lambda desc: "nothing runs here"))
    assert check("toy", "gemm") is None


def test_without_the_judge_nothing_is_said_to_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8CORE_DISABLE_PLUGINS", "reference")
    toys.register(toys.backend("toy"))
    found = check("toy", "gemm")
    assert found is not None
    assert found.failure == "the judge, backend 'reference', is not installed"


@pytest.mark.parametrize("op", OPTIONAL_OPS)
def test_fusion_that_equals_its_pair_passes(op: str) -> None:
    with fused_toy.installed(op):
        found = check("fused_toy", op)
    assert found is not None
    assert (found.failure, found.worst) == (None, 0.0)
    assert found.cases > 1


@pytest.mark.parametrize(
    ("op", "spoil"),
    turns(
        [op for op in OPTIONAL_OPS if op.endswith("_quantize")],
        [fused_toy.swapped, fused_toy.without_columnwise, lambda made: shifted(made, 1)],
    ),
)
def test_fusion_that_does_not_equal_its_pair_is_caught(
    op: str, spoil: Callable[[Quantized], Quantized]
) -> None:
    with fused_toy.installed(op, spoil=spoil):
        found = check("fused_toy", op)
    assert found is not None
    assert found.failure is not None
    assert found.judged_by == LAWS["fused_equals_its_unfused_pair"].meaning


def test_fusion_that_is_not_offered_is_not_tested() -> None:
    assert check("reference", "norm_quantize") is None


@pytest.mark.parametrize("failure", [SystemExit(5), ZeroDivisionError()])
def test_recipe_that_cannot_be_made_leaves_the_others_tested(failure: BaseException) -> None:
    def fail() -> None:
        raise failure

    toys.register(recipes={"boom": fail})
    found = findings.check(plugins.load().backends["reference"], "amax", CPU, needs_by_recipe())
    assert found is not None
    assert (found.failure, found.cases > 0) == (None, True)


def test_operation_that_exits_is_a_failure() -> None:
    def spoil(desc: OpDesc, result: Any) -> Any:
        raise SystemExit(8)

    assert "SystemExit: 8" in (spoiled(spoil, "amax").failure or "")
