"""The backend API is what its snapshot says, and every operation is documented as implemented."""

from __future__ import annotations

import inspect
import re

from fp8core.backend_api import OPS, OPTIONAL_OPS, hooks
from fp8core.backend_api.record import RECORDS
from tests.backend_api import snapshot


def test_backend_api_equals_its_snapshot() -> None:
    found = snapshot.advice(snapshot.FILE.read_text(encoding="utf-8"), snapshot.describe())
    assert not found, f"\n{found}"


def test_a_change_names_the_part_of_the_version_to_raise() -> None:
    before = snapshot.describe()
    for old, new, part in (
        ("", "    extra: int = 0", "minor"),
        ("    'gelu'\n", "    'gelu'\n    'mish'\n", "minor"),
        ("    'gelu'\n", "", "major"),
        ("    AmaxDesc\n", "    AmaxDesc\n    LaterDesc\n", "minor"),
        ("    portable: bool = False\n", "", "major"),
        ("    priority: int = 0", "    priority: float = 0", "major"),
        ("    gemm: (a, b,", "    gemm: (b, a,", "major"),
        ("    fp8core_doctor(", "    fp8core_examine(", "major"),
    ):
        after = before.replace(old, new) if old else f"{before}{new}\n"
        assert after != before
        advice = snapshot.advice(before, after)
        assert f"raise the {part} part of API_VERSION" in advice, (old, new)
        assert "python -m tests.backend_api.snapshot" in advice


def test_no_change_needs_no_advice() -> None:
    assert snapshot.advice(snapshot.describe(), snapshot.describe()) == ""


def test_every_operation_is_spelt_out_by_a_descriptor() -> None:
    fused = {op for op in OPTIONAL_OPS if op.endswith("_quantize")}  # FusedDesc says how
    assert set(snapshot.operations()) == {*OPS, *OPTIONAL_OPS} - fused


def test_documented_calls_have_the_parameters_of_records_and_of_the_reference() -> None:
    documented = {}
    for op in OPS:
        call = snapshot.operations()[op]
        parameters = call[1 : call.index(")")]
        names = [re.split("[=:]", part)[0].strip() for part in parameters.split(",")]
        documented[op] = [name for name in names if name != "*"]
    assert documented == {op: snapshot.implemented(op) for op in OPS}
    recorded = {op: [argument.name for argument in RECORDS[op].arguments] for op in OPS}
    of_variants = {"norm_backward": ["added"], "rotary": ["k", "v"]}  # described beside the call
    assert {op: names + of_variants.get(op, []) for op, names in documented.items()} == recorded


def test_there_are_five_hooks() -> None:
    names = [name for name in vars(hooks) if name.startswith("fp8core_")]
    assert names == [
        "fp8core_register_backends",
        "fp8core_register_formats",
        "fp8core_register_recipes",
        "fp8core_select_backend",
        "fp8core_doctor",
    ]
    assert all(inspect.getdoc(getattr(hooks, name)) for name in names)
