"""The reference backend holds every law, in strict mode, for more than the recipes ask for."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from itertools import chain

import numpy as np
import pytest
import torch

from fp8core.backend_api import OPTIONAL_OPS, GemmDesc, GroupedGemmDesc, OperandSpec, QuantizeDesc
from fp8core.conformance.catalogue import DTYPES, CatalogueEntry, catalogue
from fp8core.conformance.checks import Check, checks, op_of, supported
from fp8core.conformance.laws import LAWS
from fp8core.conformance.subject import Subject, find
from tests.pairs import covering

# What no recipe has: odd blocks, e2m1 under other scales, an epsilon, a transform of e4m3.
TRANSFORMED = OperandSpec("e4m3", (16, 16), 448.0, scale_format="e4m3", transform="hadamard16")
SPECS = {
    "odd_blocks": OperandSpec("e4m3", (5, 3), 448.0),
    "e2m1_float32": OperandSpec("e2m1", (1, 16), 6.0),
    "mxfp4": OperandSpec("e2m1", (1, 32), 6.0, scale_format="e8m0"),
    "e5m2_rowwise_pow2": OperandSpec("e5m2", (1, 0), 57344.0, power_of_two=True),
    "epsilon": OperandSpec("e4m3", (1, 8), 448.0, amax_epsilon=1e-3),
    "low_target": OperandSpec("e4m3", (1, 128), 15.0),
    "transformed": TRANSFORMED,
    "stochastic": OperandSpec("e2m1", (16, 16), 6.0, scale_format="e4m3", stochastic=True),
}
NUM_CHECKS = {"sample": 950, "all": 16500}
"""Floors: a kit that checks less than it did has lost something."""


def beyond_the_recipes() -> list[CatalogueEntry]:
    found = []
    for name, spec in SPECS.items():
        other = spec if spec.transform else SPECS["mxfp4"]
        nearest = replace(spec, stochastic=False)
        for dtype in DTYPES:
            for grouped in (False, True):
                label = f"{name}.{dtype}{'.grouped' if grouped else ''}"
                found.append(CatalogueEntry(label, QuantizeDesc(dtype, spec, spec, grouped)))
        found.append(CatalogueEntry(f"{name}.mixed", QuantizeDesc(torch.float32, spec, nearest)))
        found.append(CatalogueEntry(f"{name}.rowwise", QuantizeDesc(torch.float32, spec, None)))
        found.append(CatalogueEntry(f"{name}.gemm", GemmDesc(spec, other, torch.float32)))
        found.append(CatalogueEntry(f"{name}.fprop", GroupedGemmDesc(other, spec, torch.bfloat16)))
        wgrad = GroupedGemmDesc(spec, other, torch.float32, True, contract_groups=True)
        found.append(CatalogueEntry(f"{name}.wgrad", wgrad))
    return found


def values(part: object, *path: str) -> Iterator[tuple[object, ...]]:
    """The path of each field of a descriptor and of those in it, and the field's value."""
    if is_dataclass(part) and not isinstance(part, OperandSpec):
        for field in fields(part):
            yield from values(getattr(part, field.name), *path, field.name)
    else:
        yield (*path, part)


def with_each_value(entries: list[CatalogueEntry]) -> list[CatalogueEntry]:
    """Few entries, among whose descriptors each value occurs that a field of an operation has."""
    found = [dict.fromkeys(values(entry.desc, op_of(entry.desc))) for entry in entries]
    numbers = {value: number for number, value in enumerate(dict.fromkeys(chain(*found)))}
    has = np.zeros((len(entries), len(numbers)), dtype=bool)
    for row, of_entry in zip(has, found, strict=True):
        row[[numbers[value] for value in of_entry]] = True
    return [entries[at] for at in covering(has)]


def sample(subject: Subject, entries: list[CatalogueEntry], size: int) -> list[Check]:
    """Of each law and operation ``size`` checks, for which few descriptors take turns."""
    groups: dict[tuple[str, str], list[Check]] = defaultdict(list)
    for check in checks(subject, LAWS.values(), with_each_value(entries)):
        groups[check.law.name, check.op].append(check)
    return [
        group[(first + turn) % len(group)]
        for first, group in enumerate(groups.values())
        for turn in range(min(size, len(group)))
    ]


@pytest.fixture(scope="module", params=["sample", pytest.param("all", marks=pytest.mark.slow)])
def failures(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """By test of the kit: what fails, in a sample of the checks or in all, after they have run."""
    found: dict[str, list[str]] = defaultdict(list)
    subject, entries = find("reference"), [*catalogue(), *beyond_the_recipes()]
    is_sample = request.param == "sample"
    made = sample(subject, entries, 3) if is_sample else [*checks(subject, LAWS.values(), entries)]
    assert len(made) > NUM_CHECKS[request.param]
    for check in made:
        found[check.law.name] += failure(check)
    return found


def failure(check: Check) -> list[str]:
    try:
        check.run()
    except Exception as error:  # noqa: BLE001  whatever it is, it is a failure of this check
        return [f"{check.label}: {type(error).__name__}: {error}"]
    return []


@pytest.mark.parametrize("number", sorted({law.number for law in LAWS.values()}))
def test_reference_holds(number: int, failures: dict[str, list[str]]) -> None:
    found = [text for law in LAWS.values() if law.number == number for text in failures[law.name]]
    assert "\n".join(found) == ""


def test_reference_supports_every_descriptor_but_the_optional_ones() -> None:
    for one in supported(find("reference")):
        assert one.supported == (0 if one.op in OPTIONAL_OPS else one.known), one.op


def test_every_law_says_what_it_means() -> None:
    assert {law.number for law in LAWS.values()} == set(range(1, 8))
    for law in LAWS.values():
        assert law.meaning.endswith("."), law.name


def test_catalogue_names_each_descriptor_once() -> None:
    entries = catalogue()
    assert len({entry.label for entry in entries}) == len(entries)
    assert len({entry.desc for entry in entries}) == len(entries)


def test_catalogue_has_every_option_of_an_operand() -> None:
    specs = {
        value
        for entry in catalogue()
        for field in fields(entry.desc)
        if isinstance(value := getattr(entry.desc, field.name), OperandSpec)
    }
    for field in fields(OperandSpec):
        used = {getattr(spec, field.name) for spec in specs}
        assert len(used) > 1 or field.name == "amax_epsilon", field.name  # among SPECS
    assert {"hadamard16", "hadamard16_unsigned"} <= {spec.transform for spec in specs}
    assert {"MAE", "MSE"} <= {spec.four_over_six for spec in specs}


def test_a_backend_is_not_tested_by_fields_that_it_does_not_list() -> None:
    found = find("reference")
    assert found.spec is not None
    older = replace(found.spec, operand_fields=("four_over_six", "scale_max"))
    subject = Subject("older", found.backend, found.device, found.judge, older)
    entries = [entry for entry in catalogue() if entry.label.startswith("nvfp4-rows.input")]
    reasons = {subject.refuses(entry.desc) for entry in entries}
    assert reasons == {"it does not know row_scaled of an OperandSpec"}
    assert not list(checks(subject, [LAWS["quantize_codes_equal_the_reference"]], entries))
    assert list(checks(found, [LAWS["quantize_codes_equal_the_reference"]], entries))


def test_device_by_another_of_its_names_is_that_device() -> None:
    # Tensors on it say "cpu", as those on "cuda" say "cuda:0".
    found = find("reference")
    subject = Subject("named", found.backend, torch.device("cpu:0"), found.judge, found.spec)
    assert subject.device == torch.zeros(1).device
    entries = [entry for entry in catalogue() if entry.label == "current.fprop.float32.float32"]
    found_checks = list(checks(subject, [law for law in LAWS.values() if law.ops], entries))
    assert found_checks
    assert not [text for check in found_checks for text in failure(check)]
