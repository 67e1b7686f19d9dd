"""Plug-ins that cannot be used: each a row with its reason, and nothing of it left behind."""

from __future__ import annotations

import logging

import pytest
import torch

import fp8core
from fp8core import formats, recipe
from fp8core.backend_api import API_VERSION, GemmDesc, OperandSpec, QuantizeDesc
from fp8core.dispatch import plugins, policy, select
from fp8core.errors import PluginError, RecipeError, UnsupportedError
from tests.dispatch import toys

# The good half of every broken plug-in: all of it has to go when the other half is wrong.
GOOD = """
from fp8core.backend_api import API_VERSION, BackendSpec, hookimpl
from fp8core.formats import minifloat
from fp8core.recipe import Float8RowwiseScaling

FACTORY = "fp8core_backends.reference.backend:ReferenceBackend"

def spec(*fields, api_version=API_VERSION, **more):
    return BackendSpec(*fields, api_version=api_version, **more)

@hookimpl
def fp8core_register_formats(register):
    register(minifloat("toy8", 3, 4, specials="finite"))

@hookimpl
def fp8core_register_recipes(register):
    register("toy_rowwise", Float8RowwiseScaling)

@hookimpl
def fp8core_select_backend(op):
    raise AssertionError("asked although the plug-in is not used")
"""


def backends(*arguments: str) -> str:
    """Source that registers one backend for each text of arguments."""
    calls = "".join(f"    register(spec({text}))\n" for text in arguments)
    return f"{GOOD}\n@hookimpl\ndef fp8core_register_backends(register):\n{calls}"


MAJOR, MINOR = API_VERSION
BROKEN = {
    "failing_import": ("import toy_nowhere", "ModuleNotFoundError: No module named 'toy_nowhere'"),
    "exits_at_import": ("import sys\nsys.exit(3)", "SystemExit: 3"),
    "exits_without_a_word": ("raise SystemExit", "SystemExit: no message"),
    "closes_a_generator": ("raise GeneratorExit", "GeneratorExit: no message"),
    "message_raises": (
        "class Mute(Exception):\n    def __str__(self): raise OSError('mute')\nraise Mute",
        "Mute: its message cannot be read (OSError)",
    ),
    "message_exits": (
        "class Mute(Exception):\n    def __str__(self): raise SystemExit\nraise Mute",
        "Mute: its message cannot be read (SystemExit)",
    ),
    "syntax_error": ("def", "SyntaxError: invalid syntax"),
    "raises_at_import": ("raise OSError('no library')", "OSError: no library"),
    "raises_our_own": (
        "from fp8core.formats import by_name\nby_name('toy0')",
        "no format 'toy0'; known: e2m1, e4m3, e5m2, e8m0.",
    ),
    "no_hook": (
        "def fp8core_register_backends(register): pass",
        "implements no hook; hooks are fp8core_register_backends, ",
    ),
    "misspelt_hook": (
        f"{GOOD}\n@hookimpl\ndef fp8core_register_backend(register): pass",
        "unknown hook 'fp8core_register_backend'. Did you mean 'fp8core_register_backends'?",
    ),
    "wrong_signature": (
        f"{GOOD}\n@hookimpl\ndef fp8core_register_backends(registry): pass",
        "PluginValidationError: Plugin 'toy_broken' for hook 'fp8core_register_backends'",
    ),
    "hook_exits": (
        f"{GOOD}\n@hookimpl\ndef fp8core_register_backends(register): raise SystemExit(2)",
        "SystemExit: 2",
    ),
    "hook_raises": (
        f"{GOOD}\n@hookimpl\ndef fp8core_register_backends(register): 1 / 0",
        "ZeroDivisionError: division by zero",
    ),
    "newer_major": (
        backends(f"'toy', ('cpu',), FACTORY, api_version=({MAJOR + 1}, 0)"),
        f"backend 'toy' is written for backend API {MAJOR + 1}.0; this fp8core offers "
        f"{MAJOR}.{MINOR}. Install a newer fp8core",
    ),
    "older_major": (
        backends("'toy', ('cpu',), FACTORY, api_version=(2, 1)"),
        f"backend 'toy' is written for backend API 2.1; this fp8core offers {MAJOR}.{MINOR}. "
        f"Changed since: 3.0: AmaxDesc holds a QuantizeDesc, amax takes group_offsets and "
        f"quantize takes amax; 4.0: BackendSpec requires api_version, cross_entropy returns "
        f"largest beside log_sum and its backward takes both",
    ),
    "no_version": (
        f"{GOOD}\n@hookimpl\ndef fp8core_register_backends(register):\n"
        f"    register(BackendSpec('toy', ('cpu',), FACTORY))",
        "missing 1 required keyword-only argument: 'api_version'",
    ),
    "newer_minor": (
        backends(f"'toy', ('cpu',), FACTORY, api_version=({MAJOR}, {MINOR + 1})"),
        f"backend 'toy' is written for backend API {MAJOR}.{MINOR + 1}; this fp8core offers "
        f"{MAJOR}.{MINOR}",
    ),
    "one_of_two_backends_too_new": (
        backends("'toy', ('cpu',), FACTORY", "'new', ('cpu',), FACTORY, api_version=(99, 0)"),
        "backend 'new' is written for backend API 99.0",
    ),
    "taken_backend": (
        backends("'reference', ('cpu',), FACTORY"),
        "backend 'reference' is already registered by another plug-in",
    ),
    "backend_twice": (
        backends("'toy', ('cpu',), FACTORY", "'toy', ('cpu',), FACTORY"),
        "registers backend 'toy' twice",
    ),
    "unknown_field": (backends("'toy', ('cpu',), FACTORY, prio=1"), "TypeError: "),
    "not_a_backend": (
        f"{GOOD}\n@hookimpl\ndef fp8core_register_backends(register): register('toy')",
        "registers 'toy' as a backend; expected a BackendSpec",
    ),
    "not_a_format": (
        "from fp8core.backend_api import hookimpl\n"
        "@hookimpl\ndef fp8core_register_formats(register): register('toy8')",
        "registers 'toy8' as a format; expected a FormatSpec",
    ),
    "taken_format": (
        GOOD.replace('"toy8", 3, 4', '"e4m3", 3, 4'),
        "the name is taken by FormatSpec(name='e4m3'",
    ),
    "recipe_of_fp8core": (
        GOOD.replace("toy_rowwise", "delayed"),
        "recipe 'delayed' is fp8core's own",
    ),
    "recipe_without_factory": (
        GOOD.replace("Float8RowwiseScaling)", "None)"),
        "registers recipe 'toy_rowwise', None; expected a name, a factory",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_plugin_is_a_row_with_its_reason_and_leaves_nothing_behind(
    name: str, monkeypatch: pytest.MonkeyPatch, install: toys.Install
) -> None:
    source, reason = BROKEN[name]
    install(toy_broken=source)
    registry = plugins.load()
    reference, row = registry.rows
    assert reference.reason is None
    assert (row.name, row.source) == ("toy_broken", "FP8CORE_PLUGINS=toy_broken")
    assert reason in (row.reason or "")
    assert formats.names() == ("e2m1", "e4m3", "e5m2", "e8m0")
    assert registry.backends.keys() == {"reference"}
    assert registry.recipes == {}
    assert [name for name, _ in registry.manager.list_name_plugin()] == ["reference"]
    assert registry.manager.hook.fp8core_select_backend.get_hookimpls() == []
    # The others work, and whoever asks for it gets the reason.
    assert select.choose(toys.GEMM, toys.CPU, policy.current()).backend == "reference"
    with pytest.raises(PluginError) as caught:
        fp8core.use_backend("toy_broken")
    assert "use_backend() asks for backend 'toy_broken': " in str(caught.value)
    assert reason in str(caught.value)
    monkeypatch.setenv("FP8CORE_BACKEND", "toy_broken")
    with pytest.raises(PluginError, match="FP8CORE_BACKEND asks for backend 'toy_broken'"):
        select.choose(toys.GEMM, toys.CPU, policy.current())


def test_asking_for_the_backend_that_a_refused_plugin_brings_gives_the_reason(
    install: toys.Install,
) -> None:
    install(toy_broken=BROKEN["newer_major"][0])
    with pytest.raises(PluginError, match=f"backend 'toy'.* written for backend API {MAJOR + 1}.0"):
        fp8core.use_backend("toy")


def test_asking_for_an_unknown_backend_names_the_plugins_that_are_not_used(
    install: toys.Install,
) -> None:
    install(toy_broken="import toy_nowhere")
    with pytest.raises(RecipeError, match="see `fp8core doctor`: toy_broken"):
        fp8core.use_backend("toy")


def test_a_broken_plugin_is_warned_of_and_a_disabled_one_is_not(
    install: toys.Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(toy_broken="import toy_nowhere")
    with caplog.at_level(logging.WARNING, logger="fp8core"):
        plugins.load()
        (message,) = caplog.messages
        assert message.startswith("plug-in toy_broken is not used: ModuleNotFoundError: ")
        caplog.clear()
        monkeypatch.setenv("FP8CORE_DISABLE_PLUGINS", "toy_broken")
        plugins.reload()
        assert caplog.messages == []


def test_corrected_plugin_is_taken_on_reload(install: toys.Install) -> None:
    install(toy_broken="import toy_nowhere")
    assert plugins.load().rows[1].reason is not None
    install(toy_broken=backends("'toy', ('cpu',), FACTORY"))
    assert plugins.reload().rows[1].reason is None


def test_older_minor_of_the_same_major_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugins, "API_VERSION", (MAJOR, MINOR + 1))
    toys.register(toys.backend("toy", api_version=(MAJOR, MINOR)))
    assert "toy" in plugins.load().backends


@pytest.mark.parametrize(
    ("fields", "reason"),
    [((), "it does not know row_scaled of an OperandSpec"), (("row_scaled",), None)],
)
def test_a_backend_is_not_asked_about_a_field_that_it_does_not_list(
    fields: tuple[str, ...], reason: str | None
) -> None:
    spec = toys.backend("toy", operand_fields=fields)
    toys.register(spec)
    later = OperandSpec("e2m1", (1, 16), 6.0, scale_format="e4m3", row_scaled=True)
    for desc in (QuantizeDesc(torch.float32, later, None), GemmDesc(later, None, torch.float32)):
        assert plugins.load().unsupported(spec, desc, toys.CPU) == reason


def test_registering_a_broken_plugin_by_hand_raises_and_keeps_nothing() -> None:
    rows = list(plugins.load().rows)
    bad = toys.plugin(own_formats=[toys.TOY8], backends=[toys.backend("toy", api_version=(99, 0))])
    with pytest.raises(PluginError, match=r"plug-in 'toy': backend 'toy' .* API 99\.0"):
        plugins.register(bad, "toy")
    assert plugins.load().rows == rows
    assert "toy8" not in formats.names()


def test_registering_a_plugin_again_leaves_the_first_intact() -> None:
    toy = toys.plugin(fp8core_select_backend=lambda candidates: "reference")
    plugins.register(toy, "toy")
    for name in ("toy", "toy_again"):
        with pytest.raises(PluginError):
            plugins.register(toy, name)
    assert select.choose(toys.GEMM, toys.CPU, policy.current()).because == "site policy"


def test_recipe_factory_that_returns_no_recipe_is_an_error_when_asked() -> None:
    toys.register(recipes={"toy": dict})
    with pytest.raises(RecipeError, match=r"recipe 'toy': its factory returned \{\}, not a Recipe"):
        recipe.by_name("toy")


def test_plugin_whose_second_format_is_taken_leaves_the_first_unregistered() -> None:
    taken = formats.minifloat("e4m3", 3, 4, specials="finite")
    with pytest.raises(PluginError, match="the name is taken by"):
        plugins.register(toys.plugin(own_formats=[toys.TOY8, taken]), "toy")
    assert "toy8" not in formats.names()


def raising_probe() -> str | None:
    raise OSError("the driver says no")


def exiting_probe() -> str | None:
    raise SystemExit(4)


def exiting_factory() -> object:
    raise SystemExit(5)


UNUSABLE = {
    "probe_exits": ({"probe": exiting_probe}, "SystemExit: 4"),
    "probe_says_false": (
        {"probe": lambda: False},
        "its probe() returned False; expected a reason as a text, or None",
    ),
    "factory_exits": (
        {"factory": "tests.dispatch.test_plugin_failures:exiting_factory"},
        "SystemExit: 5",
    ),
    "factory_returns_no_backend": (
        {"factory": "builtins:dict"},
        "its factory 'builtins:dict' returned a dict, which has no unsupported()",
    ),
    "probe_says_no": ({"probe": lambda: "there is no driver"}, "there is no driver"),
    "probe_raises": ({"probe": raising_probe}, "OSError: the driver says no"),
    "factory_module_missing": (
        {"factory": "toy_nowhere:Backend"},
        "ModuleNotFoundError: No module named 'toy_nowhere'",
    ),
    "factory_attribute_missing": (
        {"factory": "tests.dispatch.toys:Nothing"},
        "AttributeError: module 'tests.dispatch.toys' has no attribute 'Nothing'",
    ),
    "factory_raises": ({"factory": "tests.dispatch.toys:backend"}, "TypeError: backend() missing"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_unusable_backend_is_passed_over_and_has_its_reason(name: str) -> None:
    fields, reason = UNUSABLE[name]
    spec = {"factory": "fp8core_backends.reference.backend:ReferenceBackend", **fields}
    toys.register(plugins.BackendSpec("toy", ("cpu",), priority=9, api_version=API_VERSION, **spec))
    registry = plugins.load()
    assert reason in (registry.unusable(registry.backends["toy"]) or "")
    choice = select.choose(toys.GEMM, toys.CPU, policy.current())
    assert (choice.backend, choice.substitution) == ("reference", None)
    with fp8core.use_backend("toy"), pytest.raises(UnsupportedError) as caught:
        select.choose(toys.GEMM, toys.CPU, policy.current())
    assert reason in str(caught.value)
