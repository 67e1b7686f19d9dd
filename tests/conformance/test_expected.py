"""The file of expected failures is read strictly."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8core.conformance.collection import Expected, complaints, matching, read_expected
from fp8core.errors import OperandError

TEXT = """
# a comment alone
law4_gemm_adds_the_bias/*  # the kernel has no epilogue

law1_*/mxfp8.input.[x]  #
law9_nothing/*  # never
"""


@pytest.fixture
def expected(tmp_path: Path) -> list[Expected]:
    path = tmp_path / "expected.txt"
    path.write_text(TEXT, encoding="utf-8")
    return read_expected(path)


def test_lines_are_patterns_and_reasons(expected: list[Expected]) -> None:
    assert [(one.pattern, one.reason, one.line) for one in expected] == [
        ("law4_gemm_adds_the_bias/*", "the kernel has no epilogue", 3),
        ("law1_*/mxfp8.input.[x]", "", 5),
        ("law9_nothing/*", "never", 6),
    ]


def test_star_matches_anything_and_the_rest_itself(expected: list[Expected]) -> None:
    assert matching(expected, "law4_gemm_adds_the_bias/plain.fprop.float32") is expected[0]
    assert matching(expected, "law1_codes/mxfp8.input.[x]") is expected[1]
    assert matching(expected, "law1_codes/mxfp8.input.x") is None
    assert matching(expected, "law4_gemm_adds_the_biass/plain") is None


def test_line_without_a_reason_and_line_without_a_match_are_complaints(
    expected: list[Expected],
) -> None:
    found = complaints(expected, ["law4_gemm_adds_the_bias/a", "law1_codes/mxfp8.input.[x]"])
    assert found == [
        "line 5: 'law1_*/mxfp8.input.[x]' gives no reason, after a '#'",
        "line 6: 'law9_nothing/*' matches no check",
    ]


def test_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OperandError, match=r"expected failures.*nowhere\.txt"):
        read_expected(tmp_path / "nowhere.txt")
