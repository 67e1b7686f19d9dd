"""Public names of Transformer Engine and their arguments are offered, or refused with a reason.

What takes a position there takes the same one here, what fp8core adds is keyword-only, and every
argument that is left out is in a list with the reason. Docs say which names are offered.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
from collections.abc import Callable, Collection
from operator import attrgetter
from types import ModuleType
from typing import Any

import pytest

import fp8core
from fp8core import recipe
from fp8core.names import COMMUNICATION, NOT_OFFERED
from fp8core.recipe import custom
from tests.te_signatures import TABLE, Parameter
from tests.te_surface import HOMES, PAGE, cases, page, share, stored

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


def test_each_case_has_a_test() -> None:
    root = PAGE.parent.parent
    missing = []
    for title, rows in cases().items():
        for case, test in rows:
            path, _, name = test.partition("::")
            file = root / path
            if not file.is_file() or f"\ndef {name}(" not in file.read_text(encoding="utf-8"):
                missing.append((title, case, test))
    assert missing == []


def test_nine_of_ten_names_of_layers_and_operations_are_offered() -> None:
    offered, counted = share([n for n in NAMES if n.module in ("pytorch", "pytorch.ops")])
    assert offered >= 0.9 * counted


THEIRS: dict[str, list[Parameter]] = json.loads(TABLE.read_text(encoding="utf-8"))
PACKAGE = THEIRS.pop("package"), THEIRS.pop("version")
OTHER_PLACES = {"DelayedScalingRequest": custom, "MMParams": recipe.base}

# Names of Transformer Engine that fp8core does not take, each with the reason.
_OLDER = "an older name of an argument that is taken under its new one"
NOT_TAKEN = {
    "autocast": {"_graph": "private: Transformer Engine's own graphs pass it"},
    "fp8_autocast": {"_graph": "private: Transformer Engine's own graphs pass it"},
    "make_graphed_callables": {
        **dict.fromkeys(("fp8_enabled", "fp8_calibrating", "fp8_recipe", "fp8_group"), _OLDER),
        "fp8_weight_caching": _OLDER,
    },
}
# Defaults that differ: {name: (theirs, ours)}.
_DEVICE = {"device": ("'cuda'", None)}
_RESET = {"defer_init": ("None", False)}
OTHER_DEFAULTS: dict[str, dict[str, tuple[str | None, object]]] = {
    **dict.fromkeys(("Linear", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"), _DEVICE),
    **dict.fromkeys(("MultiheadAttention", "TransformerLayer"), _DEVICE),
    **dict.fromkeys(("LayerNorm.reset_parameters", "RMSNorm.reset_parameters"), _RESET),
    "make_graphed_callables": {
        "enabled": ("None", True),
        "calibrating": ("None", False),
        "cache_quantized_params": ("None", False),
    },
    "CustomRecipe": {"qfactory": (None, None), "fp8_format": ("Format.HYBRID", None)},
}


def here(key: str, name: str) -> str:
    """Return what a parameter of ``key`` is called here: torch's own layers call it `input`, and a
    converted one is both."""
    return "input" if name == "inp" and key.endswith(".forward") else name


def ours(key: str) -> list[inspect.Parameter]:
    """Return the parameters of what ``key`` names, ``self`` excluded."""
    found: Callable[..., Any] = attrgetter(key)(
        OTHER_PLACES.get(key) or (recipe if hasattr(recipe, key) else fp8core)
    )
    parameters = list(inspect.signature(found).parameters.values())
    return [p for p in parameters if p.name != "self"]


def positional(parameters: list[inspect.Parameter]) -> list[str]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind in kinds]


def evaluated(text: str) -> object:
    """Return the value of a default's source text, environment variables taken as unset."""
    names = {"Format": recipe.Format, "MMParams": recipe.MMParams, "os": _Unset}
    names["DType"] = fp8core.DType
    return eval(text, {"__builtins__": {}}, names)


class _Unset:
    """The ``os`` of a machine without environment variables."""

    @staticmethod
    def getenv(name: str, default: object) -> object:
        return default


def test_the_table_names_its_version() -> None:
    assert PACKAGE == ("transformer_engine_cu13", "2.20.2")


def test_a_position_means_what_it_means_there() -> None:
    found, expected = {}, {}
    for key, parameters in THEIRS.items():
        found[key] = positional(ours(key))
        theirs = [here(key, name) for name, kind, _ in parameters if kind == "positional"]
        expected[key] = theirs[: len(found[key])]
    assert found == expected


def test_every_name_is_taken_or_listed() -> None:
    left_out = {}
    for key, parameters in THEIRS.items():
        theirs = {here(key, name) for name, kind, _ in parameters if not kind.startswith("var")}
        if missing := theirs - {parameter.name for parameter in ours(key)}:
            left_out[key] = missing
    assert left_out == {key: set(reasons) for key, reasons in NOT_TAKEN.items()}


def test_what_is_added_is_keyword_only() -> None:
    kinds = inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.VAR_KEYWORD
    positions = {
        key: [parameter.name for parameter in ours(key) if parameter.kind not in kinds]
        for key in THEIRS
    }
    assert {
        key: added
        for key, names in positions.items()
        if (added := set(names) - {here(key, name) for name, _, _ in THEIRS[key]})
    } == {}


def test_defaults_are_theirs_but_for_those_listed() -> None:
    found, expected = {}, {}
    for key, parameters in THEIRS.items():
        mine = {parameter.name: parameter.default for parameter in ours(key)}
        for name, kind, text in parameters:
            if kind.startswith("var") or name in NOT_TAKEN.get(key, ()):
                continue
            own = mine.get(here(key, name))
            listed = OTHER_DEFAULTS.get(key, {}).get(name)
            theirs = inspect.Parameter.empty if text is None else evaluated(text)
            found[key, name] = own if listed is None else (text, own)
            expected[key, name] = theirs if listed is None else listed
    assert found == expected
