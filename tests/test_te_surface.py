"""Every public name of Transformer Engine is offered, or refused with a reason; docs say which."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Collection
from types import ModuleType

import pytest

import fp8core
from fp8core.names import COMMUNICATION, NOT_OFFERED
from tests.te_surface import HOMES, PAGE, page, share, stored

NAMES = stored()
# Modules whose names raise an error that says what to use instead.
SPEAKING = ("fp8core", "fp8core.ops", "fp8core.recipe")


def test_the_table_is_that_of_the_pinned_version() -> None:
    counts = {module: sum(name.module == module for name in NAMES) for module in HOMES}
    assert counts["pytorch"] > 70
    assert counts["pytorch.ops"] > 40
    assert all(counts.values())


def test_a_name_is_either_offered_or_has_a_reason() -> None:
    assert [name.here for name in NAMES if name.is_offered == (name.reason is not None)] == []


def test_every_reason_is_of_a_name_of_theirs() -> None:
    """The list of what is not offered is the table without what is offered."""
    assert {name.here for name in NAMES if not name.is_offered} == set(NOT_OFFERED)


def test_reason_about_context_parallelism_names_the_method_that_offers_it() -> None:
    method = NOT_OFFERED["CPLoadBalancingStrategy"].split()[0]
    assert hasattr(fp8core.DotProductAttention, method)


def test_communication_is_a_part_of_what_is_not_offered() -> None:
    assert {name.here for name in NAMES if name.is_communication} == COMMUNICATION


def test_a_name_that_is_not_offered_raises_its_reason() -> None:
    found, expected = {}, {}
    for name in NAMES:
        if name.is_offered or HOMES[name.module] not in SPEAKING:
            continue
        with pytest.raises(AttributeError) as caught:
            getattr(importlib.import_module(HOMES[name.module]), name.name)
        found[name.here] = str(caught.value)
        expected[name.here] = f"fp8core offers no {name.here}: {name.reason}."
    assert found == expected


def public(module: ModuleType) -> Collection[str]:
    """The names of a room's face, or of a module that is none."""
    return getattr(module, "__all__", dir(module))


def test_what_a_module_offers_is_in_its_list_of_names() -> None:
    unlisted = {
        name.here
        for name in NAMES
        if name.is_offered
        and importlib.util.find_spec(HOMES[name.module]) is not None
        and name.name not in public(importlib.import_module(HOMES[name.module]))
    }
    assert unlisted == set()


def test_the_page_is_that_of_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text == page(NAMES), "write it by `python -m tests.te_surface`"


def test_nine_of_ten_names_of_layers_and_operations_are_offered() -> None:
    offered, counted = share([n for n in NAMES if n.module in ("pytorch", "pytorch.ops")])
    assert offered >= 0.9 * counted
