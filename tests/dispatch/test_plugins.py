"""Plug-ins that work: what they bring, where they are found, and what is isolated from what."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest
import torch

import fp8core
from fp8core import formats, recipe
from fp8core.backend_api import OperandSpec, QuantizeDesc
from fp8core.dispatch import plugins, policy, select, table
from fp8core.dispatch.registry import PluginRow, Registry
from fp8core.errors import PluginError, RecipeError, UnsupportedError
from tests.dispatch import toys

MODULE = """
from fp8core.backend_api import API_VERSION, BackendSpec, hookimpl
from fp8core.formats import minifloat

@hookimpl
def fp8core_register_formats(register):
    register(minifloat("toy8", 3, 4, specials="finite"))

@hookimpl
def fp8core_register_backends(register):
    factory = "fp8core_backends.reference.backend:ReferenceBackend"
    register(BackendSpec("toy", ("cpu",), factory, api_version=API_VERSION))
"""


def test_reference_is_found_as_an_entry_point() -> None:
    (row,) = plugins.load().rows
    assert row == PluginRow("reference", "entry point fp8core_backends.reference", None)


def test_loading_twice_gives_the_same_registry() -> None:
    assert plugins.load() is plugins.load()


def test_loading_in_many_threads_discovers_once() -> None:
    found: list[Registry] = []
    threads = [threading.Thread(target=lambda: found.append(plugins.load())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(map(id, found))) == 1


def test_module_named_by_the_environment_is_loaded(install: toys.Install) -> None:
    install(toy_module=MODULE)
    registry = plugins.load()
    assert PluginRow("toy_module", "FP8CORE_PLUGINS=toy_module", None) in registry.rows
    assert "toy" in registry.backends


def test_plugin_named_twice_is_loaded_once_and_says_so(
    monkeypatch: pytest.MonkeyPatch, install: toys.Install
) -> None:
    install(toy_module=MODULE)
    monkeypatch.setenv("FP8CORE_PLUGINS", "toy_module,toy_module")
    registry = plugins.load()
    reasons = [row.reason for row in registry.rows if row.name == "toy_module"]
    assert reasons == [None, "another plug-in is called 'toy_module'"]
    assert "toy" in registry.backends


def test_module_that_is_also_an_entry_point_is_loaded_once_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FP8CORE_PLUGINS", "fp8core_backends.reference")
    registry = plugins.load()
    assert registry.rows[1].reason == "the same plug-in is loaded already, as 'reference'"
    assert "reference" in registry.backends


@pytest.mark.parametrize("disabled", ["reference", "toy_module"])
def test_disabled_plugin_is_left_out(
    disabled: str, monkeypatch: pytest.MonkeyPatch, install: toys.Install
) -> None:
    install(toy_module=MODULE)
    monkeypatch.setenv("FP8CORE_DISABLE_PLUGINS", disabled)
    registry = plugins.load()
    kept = {"reference", "toy"} - {"toy" if disabled == "toy_module" else disabled}
    assert registry.backends.keys() == kept


def test_disabled_plugin_is_not_imported(
    monkeypatch: pytest.MonkeyPatch, install: toys.Install
) -> None:
    install(toy_module=MODULE)
    monkeypatch.setenv("FP8CORE_DISABLE_PLUGINS", "toy_module")
    plugins.load()
    assert "toy_module" not in sys.modules


def test_asking_for_a_disabled_backend_says_that_it_is_disabled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FP8CORE_DISABLE_PLUGINS", "reference")
    with pytest.raises(PluginError, match="disabled by FP8CORE_DISABLE_PLUGINS"):
        fp8core.use_backend("reference")


def test_the_variable_that_leaves_the_reference_out_is_named_as_the_cause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = "FP8CORE_DISABLE_PLUGINS leaves out reference; unset it"
    monkeypatch.setenv("FP8CORE_DISABLE_PLUGINS", "reference")
    plugins.reload()
    with pytest.raises(UnsupportedError, match=f"^no backend can be used here: {said}$"):
        fp8core.Linear(32, 32)
    layer = fp8core.Linear(32, 32, device="cpu", name="left_out")
    with pytest.raises(UnsupportedError, match=f"no backend runs .* on cpu: {said}\n"):
        layer(torch.ones(2, 32))


def test_a_variable_that_leaves_another_plugin_out_is_no_cause(
    monkeypatch: pytest.MonkeyPatch, install: toys.Install
) -> None:
    monkeypatch.setenv("FP8CORE_DISABLE_PLUGINS", "toy_module")
    install(toy_module=MODULE)
    desc = QuantizeDesc(torch.bfloat16, OperandSpec("toy8", (0, 0), 31.0), None)
    with pytest.raises(UnsupportedError) as caught:
        select.choose(desc, torch.device("cpu"), policy.current())
    assert "unset it" not in str(caught.value)
    assert "plug-in toy_module is not used: disabled by FP8CORE_DISABLE_PLUGINS" in str(
        caught.value
    )


def test_backend_is_imported_on_first_use_only() -> None:
    spec = toys.backend("toy")
    made = sys.modules.pop("toy_backend_toy")
    toys.register(spec)
    assert plugins.load().spec("toy", "this test") is spec
    sys.modules["toy_backend_toy"] = made
    assert plugins.load().instance(spec) is plugins.load().instance(spec)


def test_reload_forgets_what_was_registered_by_hand() -> None:
    toys.register(toys.backend("toy"))
    assert "toy" not in plugins.reload().backends


def test_reload_follows_the_environment(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "toy_module.py").write_text(MODULE)
    assert "toy" not in plugins.load().backends
    monkeypatch.setenv("FP8CORE_PLUGINS", "toy_module")
    assert "toy" in plugins.reload().backends


def test_format_of_a_plugin_is_known_by_name(install: toys.Install) -> None:
    install(toy_module=MODULE)
    assert formats.by_name("toy8").max == 31.0


def test_format_is_still_found_after_an_invalid_setting_is_corrected(
    monkeypatch: pytest.MonkeyPatch, install: toys.Install
) -> None:
    install(toy_module=MODULE)
    monkeypatch.setenv("FP8CORE_STRICT", "perhaps")
    with pytest.raises(RecipeError, match="FP8CORE_STRICT"):
        formats.by_name("toy8")
    monkeypatch.delenv("FP8CORE_STRICT")
    assert formats.by_name("toy8").max == 31.0


@pytest.mark.parametrize("name", ["toy8", "TOY8", recipe.Format.E4M3])
def test_recipe_takes_a_format_of_a_plugin_by_name(name: str) -> None:
    plugins.register(toys.whole_plugin(), "toy")
    plan = recipe.Float8CurrentScaling(fp8_format=name).plan(recipe.LayerRole(), torch.bfloat16)
    spec = formats.by_name(name.lower())
    assert plan.fprop.a == recipe.OperandSpec(spec.name, (0, 0), spec.max)


def test_layer_computes_in_a_format_of_a_plugin() -> None:
    plugins.register(toys.whole_plugin(), "toy")
    layer = fp8core.Linear(16, 8, bias=False, device="cpu")
    x = torch.randn(4, 16)
    with fp8core.autocast(recipe=recipe.Float8CurrentScaling(fp8_format="toy8")):
        y = layer(x)

    def rounded(value: torch.Tensor) -> torch.Tensor:
        scale = torch.tensor(31.0) / value.abs().max()
        return toys.TOY8.decode(toys.TOY8.encode(value * scale)) * (1 / scale)

    torch.testing.assert_close(
        y, rounded(x) @ rounded(layer.weight.detach()).T
    )  # [4, 16] x [8, 16]


def test_recipe_of_a_plugin_is_known_by_name() -> None:
    plugins.register(toys.whole_plugin(), "toy")
    assert recipe.by_name("toy_rowwise") == recipe.Float8RowwiseScaling(fp8_format="toy8")


def test_recipes_of_plugins_are_listed_after_fp8cores_own() -> None:
    plugins.register(toys.whole_plugin(), "toy")
    assert recipe.names()[-1] == "toy_rowwise"


def test_layer_trains_on_the_backend_of_a_plugin() -> None:
    calls: list[str] = []
    plugins.register(toys.whole_plugin(calls), "toy")
    layer = fp8core.Linear(16, 8)
    with fp8core.autocast():
        layer(torch.randn(4, 16, requires_grad=True)).sum().backward()
    # Of input, weight and gradient, and of the weight again in backward.
    assert (calls.count("gemm"), calls.count("quantize")) == (3, 4)


def test_plugin_that_asks_while_it_loads_sees_what_is_there_so_far() -> None:
    seen: list[list[str]] = []

    def register_backends(register: object) -> None:
        seen.append(sorted(plugins.load().backends))

    toys.register(fp8core_register_backends=register_backends)
    assert seen == [["reference"]]


def test_plugin_and_format_discovery_in_two_threads_do_not_wait_for_each_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loading, listing = threading.Event(), threading.Event()
    monkeypatch.setattr(threading, "toy_events", (loading, listing), raising=False)
    (folder / "toy_slow.py").write_text(
        "import threading\n"
        "from fp8core import errors, formats\n"
        "loading, listing = threading.toy_events\n"
        "loading.set()\n"
        "listing.wait(10)\n"
        "try:\n"
        "    formats.by_name('toy_none')\n"
        "except errors.RecipeError:\n"
        "    pass\n" + MODULE
    )
    monkeypatch.setenv("FP8CORE_PLUGINS", "toy_slow")

    def list_formats() -> None:
        loading.wait(10)
        threading.Timer(0.1, listing.set).start()  # by then names() has taken its lock
        formats.names()

    threads = [threading.Thread(target=f, daemon=True) for f in (plugins.load, list_formats)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_registering_a_plugin_resolves_anew() -> None:
    before = table.resolve(toys.GEMM, toys.CPU)
    toys.register(toys.backend("toy"))
    after = table.resolve(toys.GEMM, toys.CPU)
    assert (before.choice.backend, after.choice.backend) == ("reference", "toy")
