"""``fp8core conformance``: what it prints, what it writes, how it exits."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from fp8core.__main__ import main
from fp8core.backend_api import GemmDesc, OpDesc, QuantizeDesc
from fp8core.recipe import Recipe
from fp8core.recipe.plan import GemmPlan, LayerRole, LinearPlan
from fp8core_backends.reference.backend import ReferenceBackend
from tests.dispatch import toys

pytestmark = pytest.mark.usefixtures("isolated")


def conformance(*arguments: str) -> int:
    return main(["conformance", *arguments])


def only_gemm(desc: OpDesc) -> str | None:
    is_right = type(desc) is GemmDesc and desc.a == desc.b == toys.E4M3
    return None if is_right else "only products of e4m3"


def takes_too_much(desc: OpDesc) -> str | None:
    return None if isinstance(desc, GemmDesc) else "only products"


def test_passing_run_exits_with_0_and_says_what_is_supported(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert conformance("reference", "-k", "law7_something or law7_alignment") == 0
    out = capsys.readouterr().out
    assert "fp8core conformance: reference on cpu" in out
    assert re.search(r"^gemm: supports ([1-9]\d*) of \1 descriptors$", out, re.MULTILINE)
    assert "law7_alignment_is_positive" in out


def test_broken_law_exits_with_1_and_names_the_test(capsys: pytest.CaptureFixture[str]) -> None:
    toys.register(toys.backend("toy", refuse=takes_too_much))
    assert conformance("toy", "-k", "law7_unknown_values or law7_something") == 1
    out = capsys.readouterr().out
    assert "law7_unknown_values_are_denied/backend" in out
    assert "is said to be supported" in out


def test_backend_that_cannot_answer_breaks_a_law(capsys: pytest.CaptureFixture[str]) -> None:
    def refuse(desc: OpDesc) -> str | None:
        raise OSError("no driver")

    toys.register(toys.backend("toy", refuse=refuse))
    assert conformance("toy", "-k", "law7_unsupported_gives or law7_something") == 1
    out = capsys.readouterr().out
    assert "OSError: no driver" in out
    assert "supports no descriptor that any layer asks for" in out


def test_words_that_match_no_check_exit_with_2_and_no_table(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert conformance("reference", "-k", "nothingmatches") == 2
    out, err = capsys.readouterr()
    assert "-k 'nothingmatches' matches no check of 'reference'" in err
    assert "supports" not in out


def test_words_do_not_match_the_name_of_the_backend(capsys: pytest.CaptureFixture[str]) -> None:
    toys.register(toys.backend("toy", refuse=takes_too_much))
    assert conformance("toy", "-k", "toy") == 2
    assert "-k 'toy' matches no check of 'toy'" in capsys.readouterr().err


def test_failures_are_cut_and_summed_up_by_law(capsys: pytest.CaptureFixture[str]) -> None:
    def bind(backend: toys.ToyBackend, desc: OpDesc, device: torch.device) -> NoReturn:
        raise OSError("no driver\n" + "a line\n" * 99 + "x" * 9999)

    toys.register(toys.backend("toy", refuse=only_gemm, bind=bind))
    status, found = report("-k", "law4_gemm_product or law4_gemm_adds")
    assert status == 1
    messages = [one["message"].splitlines() for one in found["not_passed"]]
    assert len(messages) > 5
    for lines in messages:
        assert len(lines) == 20
        assert "law 4: " in lines[1]
        assert "OSError: no driver" in lines[2]
        assert lines[-1] == "  ... and 84 more lines"
    out = capsys.readouterr().out
    assert re.search(rf"^ +0 +{len(messages)} +0 +0 +law 4$", out, re.MULTILINE)
    assert f"failed, by law\n  law 4: {len(messages)}\n    law4_" in out
    assert f"    and {len(messages) - 5} more" in out
    assert len(out.splitlines()) < 30 * len(messages)


def test_error_of_a_backend_is_shown_with_its_place(capsys: pytest.CaptureFixture[str]) -> None:
    def bind(backend: toys.ToyBackend, desc: OpDesc, device: torch.device) -> NoReturn:
        raise OSError("no driver")

    toys.register(toys.backend("toy", refuse=only_gemm, bind=bind))
    assert conformance("toy", "-k", "law4_gemm_adds") == 1
    out = capsys.readouterr().out
    assert "raised OSError: no driver" in out
    assert 'raise OSError("no driver")' in out


def test_unknown_backend_exits_with_2_and_the_nearest_name(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert conformance("referense") == 2
    assert "Did you mean 'reference'?" in capsys.readouterr().err


def test_unusable_backend_exits_with_2_and_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    toys.register(toys.backend("toy", probe=lambda: "the driver is too old"))
    assert conformance("toy") == 2
    assert "cannot be used here: the driver is too old" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "message"),
    [("gpu0", "is no torch device"), ("cuda:0", "backend 'toy' runs on cpu, not on cuda:0")],
)
def test_wrong_device_exits_with_2(
    device: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    toys.register(toys.backend("toy"))
    assert conformance("toy", "--device", device) == 2
    assert message in capsys.readouterr().err


def test_missing_file_of_expected_failures_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance("reference", "--xfail", "nowhere.txt") == 2
    assert "nowhere.txt" in capsys.readouterr().err


def test_without_pytest_it_exits_with_2_and_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "pytest", None)
    assert conformance("reference") == 2
    assert "python -m pip install pytest" in capsys.readouterr().err


def report(*arguments: str) -> tuple[int, dict[str, Any]]:
    status = conformance("toy", "--json", "report.json", *arguments)
    found: dict[str, Any] = json.loads(Path("report.json").read_text(encoding="utf-8"))
    return status, found


def test_json_holds_versions_support_laws_and_failures() -> None:
    fields = ("row_scaled", "four_over_six", "scale_max")
    toys.register(toys.backend("toy", refuse=takes_too_much, operand_fields=fields))
    words = "law7_unknown_values or law4_gemm_adds_the_bias/current.fprop.bfloat16"
    status, found = report("-k", words)
    assert status == 1
    assert found["backend"] == "toy"
    assert found["device"] == "cpu"
    assert set(found["versions"]) == {"backend_api", "fp8core", "torch"}
    (gemm,) = (one for one in found["support"] if one["op"] == "gemm")
    assert gemm["supported"] == gemm["known"]
    (bias,) = (one for one in found["laws"] if one["name"] == "law4_gemm_adds_the_bias")
    assert (bias["law"], bias["op"], bias["passed"], bias["failed"]) == (4, "gemm", 1, 0)
    assert 0 < bias["worst"] <= 1
    assert found["counts"] == {"passed": 1, "failed": 1, "xfailed": 0, "skipped": 0}
    (failure,) = found["not_passed"]
    assert failure["id"] == "law7_unknown_values_are_denied/backend"
    assert "is said to be supported" in failure["message"]


def test_json_of_a_worst_error_that_is_infinite_is_valid() -> None:
    def bind(backend: toys.ToyBackend, desc: OpDesc, device: torch.device) -> Any:
        run = ReferenceBackend().bind(desc, device)
        return lambda *given, **words: run(*given, **words).fill_(float("nan"))

    toys.register(toys.backend("toy", refuse=only_gemm, bind=bind))
    status, found = report("-k", "law4_gemm_product")
    assert status == 1
    assert found["laws"][0]["worst"] == "inf"


def write(text: str) -> str:
    Path("expected.txt").write_text(text, encoding="utf-8")
    return "--xfail=expected.txt"


def test_expected_failure_is_no_failure() -> None:
    toys.register(toys.backend("toy", refuse=takes_too_much))
    xfail = write("law7_unknown_values_are_denied/*  # a toy takes anything\n")
    status, found = report(xfail, "-k", "law7_unknown_values or expected_failures")
    assert status == 0
    assert found["counts"] == {"passed": 0, "failed": 0, "xfailed": 1, "skipped": 0}
    assert found["not_passed"][0]["message"] == "a toy takes anything"


def test_expected_failure_that_passes_is_a_failure() -> None:
    toys.register(toys.backend("toy", refuse=only_gemm))
    xfail = write("law7_something_is_supported/*  # it was so once\n")
    status, found = report(xfail, "-k", "law7_something")
    assert status == 1
    assert "passes, but line 1" in found["not_passed"][0]["message"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("law7_unknown_values_are_denied/*\n", "gives no reason"),
        ("law7_unknwon_values/*  # a slip\n", "matches no check"),
    ],
    ids=["no reason", "no match"],
)
def test_line_that_says_nothing_is_a_failure(
    text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    toys.register(toys.backend("toy", refuse=takes_too_much))
    assert conformance("toy", write(text), "-k", "expected_failures") == 1
    assert message in capsys.readouterr().out


IDLE = "law7_every_operation_with_a_method_is_supported"


@pytest.mark.parametrize("asked", ["option", "environment"])
def test_strict_mode_refuses_a_method_without_support(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = toys.backend("toy", refuse=only_gemm)
    toys.register(spec)
    made = sys.modules[spec.factory.partition(":")[0]].Made
    instance = made()
    instance.norm = lambda *given: None
    sys.modules[spec.factory.partition(":")[0]].Made = lambda: instance  # type: ignore[attr-defined]
    assert conformance("toy", "-k", "law7_something") == 0
    if asked == "environment":
        monkeypatch.setenv("FP8CORE_STRICT", "1")
    status, found = report("-k", IDLE, *(["--strict"] if asked == "option" else []))
    assert status == 1
    assert found["strict"]
    assert "norm" in found["not_passed"][0]["message"]


@dataclass(frozen=True, slots=True)
class Unheard(Recipe):
    """Rounds e4m3 stochastically, which the reference does not.

    Instances are equal, as those of other recipes: the kit computes its catalogue once.
    """

    def plan(self, role: LayerRole, dtype: torch.dtype) -> LinearPlan:
        spec = replace(toys.E4M3, stochastic=True)
        gemm = GemmPlan(spec, spec)
        return LinearPlan(gemm, gemm, gemm)


@pytest.mark.parametrize("strict", [False, True])
def test_what_nobody_can_judge_is_skipped_and_a_failure_in_strict_mode(strict: bool) -> None:
    def refuse(desc: OpDesc) -> str | None:
        return None if isinstance(desc, QuantizeDesc) and "stochastic" in str(desc) else "no"

    toys.register(toys.backend("toy", refuse=refuse), recipes={"unheard": Unheard})
    words = "law1_quantize_scales and unheard.input.bfloat16"
    status, found = report("-k", words, *(["--strict"] if strict else []))
    assert status == int(strict)
    (one,) = found["not_passed"]
    assert one["outcome"] == ("failed" if strict else "skipped")
    assert "no stochastic rounding of e4m3" in one["message"]
