"""Plug-ins that answer nonsense: each is refused by name, and stops no other."""

from __future__ import annotations

import dis
import os
import sys
import types
from collections.abc import Callable
from functools import partial
from importlib.metadata import EntryPoint
from typing import Any, NoReturn

import pytest
import torch

import fp8core
from fp8core import formats
from fp8core.backend_api import API_VERSION, Alignment, GemmDesc, UnsupportedError, hookimpl
from fp8core.dispatch import isolation, plugins, policy, select
from fp8core.errors import PluginError, RecipeError
from tests.dispatch import toys
from tests.pairs import pairs
from tests.refusals import unrefused


class WithoutClass(Exception):
    """Its class cannot be asked for."""

    @property
    def __class__(self) -> Any:
        raise SystemExit(7)


class _Unnamed(type):
    @property
    def __name__(cls) -> str:  # type: ignore[override]  # a text, in a class that is no plug-in's
        raise SystemExit(7)


class WithoutName(Exception, metaclass=_Unnamed):
    """Its class has no name."""


class Text(str):
    """A text that can only be looked at."""

    __slots__ = ()

    def _exit(self, *args: Any) -> NoReturn:
        raise SystemExit(7)

    __format__ = __getitem__ = __len__ = strip = _exit  # type: ignore[assignment]  # nonsense


class WithoutText(Exception):
    """Its message is a text of a class of its own."""

    def __str__(self) -> str:
        return Text("why")


class Refused(UnsupportedError):
    """An error of fp8core with a constructor of its own."""

    def __init__(self, desc: object, device: object) -> None:
        super().__init__(f"not {device}")


def raising(error: BaseException) -> Callable[..., NoReturn]:
    def call(*args: object, **kwargs: object) -> NoReturn:
        raise error

    return call


# Made in the tests: pytest itself does not survive them as parameters.
ERRORS: dict[str, Callable[[], BaseException]] = {
    "without a class": lambda: WithoutClass("why"),
    "without a name": lambda: WithoutName("why"),
    "without a text": WithoutText,
}
ANSWERS: dict[str, Callable[[], object]] = {**ERRORS, "a text": lambda: Text(" ")}


def run() -> torch.Size:
    y: torch.Tensor = fp8core.Linear(16, 16, device="cpu")(torch.ones(2, 16))
    return y.shape


@pytest.mark.parametrize(("kind", "where"), pairs(ERRORS, ["probe", "refuse"]))
def test_an_error_that_cannot_be_described_stops_nobody(where: str, kind: str) -> None:
    fields: dict[str, Any] = {where: raising(ERRORS[kind]())}
    toys.register(toys.backend("toy", priority=99, **fields))
    registry = plugins.load()
    reason = registry.unsupported(registry.backends["toy"], toys.GEMM, toys.CPU)
    assert str(reason).endswith(": why")
    assert run() == (2, 16)


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.parametrize("where", ["probe", "refuse"])
def test_an_answer_that_cannot_be_looked_at_stops_nobody(where: str, kind: str) -> None:
    fields: dict[str, Any] = {where: lambda *args: ANSWERS[kind]()}
    toys.register(toys.backend("toy", priority=99, **fields))
    registry = plugins.load()
    assert registry.unsupported(registry.backends["toy"], toys.GEMM, toys.CPU)
    assert run() == (2, 16)


def test_a_reason_is_a_text_that_every_terminal_prints() -> None:
    reason = Text("a\ud800b\x1b[2J\r\0" + "c" * 100_000)
    toys.register(toys.backend("toy", probe=lambda: reason))
    registry = plugins.load()
    found = registry.unusable(registry.backends["toy"])
    assert type(found) is str
    assert found.startswith("a\\ud800b\\x1b[2J\\r\\x00ccc")
    assert len(found) < isolation.MOST_CHARACTERS + 50
    assert found.encode("ascii")


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_pick_that_cannot_be_looked_at_is_an_error_that_names_the_plugin(kind: str) -> None:
    toys.register(fp8core_select_backend=lambda op: ANSWERS[kind]())
    with pytest.raises((PluginError, UnsupportedError), match="toy"):
        select.choose(toys.GEMM, toys.CPU, policy.NO_POLICY)


def test_an_error_with_a_constructor_of_its_own_is_raised_as_ours() -> None:
    toys.register(toys.backend("toy", priority=99, bind=raising(Refused(1, "here"))))
    with pytest.raises(UnsupportedError, match=r"^Linear\(16, 16\): not here$"):
        run()


@pytest.mark.parametrize("size", [0, -16, 1.5, "16", True, None])
def test_an_alignment_to_no_size_is_an_error_that_names_the_backend(size: Any) -> None:
    class Aligned(toys.ToyBackend):
        def alignment(self, desc: GemmDesc) -> Alignment:
            return Alignment(k=size)

    spec = toys.backend("toy", priority=99)
    module = sys.modules[spec.factory.partition(":")[0]]
    module.Made = lambda: Aligned(toys.takes_all, [])  # type: ignore[attr-defined]
    toys.register(spec)
    with pytest.raises(PluginError, match=r"toy says .* its alignment\(\) returned .*k="):
        run()


@pytest.mark.parametrize("kinds", [("quantum",), ("quantum", "cpu")])
def test_a_device_that_torch_does_not_know_stops_nobody(kinds: tuple[str, ...]) -> None:
    toys.register(toys.backend("toy", priority=99, device_types=kinds))
    assert fp8core.Linear(16, 16).weight.device.type == "cpu"
    registry = plugins.load()
    reason = registry.unusable(registry.backends["toy"])
    unknown = "this torch knows no type of device called quantum"
    assert reason == (unknown if kinds == ("quantum",) else None)


FIELDS = {
    "name": ["", " ", "a,b", "a=b", "--to", "a\nb", "\ud800"],
    "device_types": [("",), ("cuda:7",), ("CPU",), ("cpu\n",), "cuda", ()],
    "factory": [":", "a:", ":a", "a:b:c", "a:b\n", toys.BackendSpec],
    "priority": ["high"],
    "probe": ["no"],
    "builder": ["a", "a:"],
    "selftest": ["a", "a:"],
    "portable": ["no", None, 1],
    "transposes": ["no", None, 1],
    "api_version": [(2,), "2.0", (2, "x"), None, (2, 0, 0), [2, 0]],
}


def test_a_field_that_means_nothing_is_refused_by_name() -> None:
    fields: dict[str, Any] = {
        **{"name": "toy", "device_types": ("cpu",), "factory": "a:B"},
        "api_version": API_VERSION,
    }

    def register(name: str, value: Any) -> None:
        spec = toys.BackendSpec(**{**fields, name: value})
        plugins.register(toys.plugin(backends=[spec]), "toy")

    table = {
        f"{name}={value!r}": (partial(register, name, value), PluginError, rf"{name}=.*; expected ")
        for name, values in FIELDS.items()
        for value in values
    }
    assert unrefused(table) == {}


def test_a_recipe_needs_a_name_that_can_be_written() -> None:
    for name in ("none", "", "a,b", "\n", 3):
        with pytest.raises(PluginError, match="recipe"):
            toys.register(recipes={name: fp8core.recipe.Float8CurrentScaling})


def test_a_default_recipe_that_does_not_exist_names_the_backend() -> None:
    toys.register(toys.backend("toy", priority=99, preferred_recipe="nope"))
    with pytest.raises(RecipeError, match=r"backend 'toy' prefers .*'nope'"):
        fp8core.get_default_recipe()


async def waits(register: Callable[..., None]) -> None:
    register(toys.backend("toy"))


def yields(register: Callable[..., None]) -> Any:
    register(toys.backend("toy"))
    yield


@pytest.mark.parametrize("hook", [waits, yields])
def test_a_hook_that_runs_nothing_is_refused(hook: Callable[..., Any]) -> None:
    module = types.ModuleType("toy_module")
    module.fp8core_register_backends = hookimpl(hook)  # type: ignore[attr-defined]
    with pytest.raises(PluginError, match="its fp8core_register_backends is async or has a yield"):
        plugins.register(module, "toy")


class Equal:
    """A plug-in that takes every other for itself."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = object.__hash__

    @hookimpl
    def fp8core_select_backend(self, op: str) -> None:
        return None


def test_a_plugin_that_compares_by_value_stops_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("toy_equal")
    module.plugin = Equal()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "toy_equal", module)
    installed = plugins.entry_points

    def points(group: str) -> list[EntryPoint]:
        return [EntryPoint("a", "toy_equal:plugin", group), *installed(group=group)]

    monkeypatch.setattr(plugins, "entry_points", points)
    first, second = plugins.load().rows
    assert "class Equal, which compares by value" in str(first.reason)
    assert (second.name, second.reason) == ("reference", None)


# --- Ctrl-C after every call in what keeps plug-ins ---


def interrupt_at(number: int, functions: list[Callable[..., Any]]) -> Callable[..., Any]:
    """Return a trace function: Ctrl-C after the call of that number which ``functions`` make.

    Python looks for signals there; between other instructions, as those of ``with``, it does not.
    """
    codes, left, ran = {own.__code__ for own in functions}, number, 0

    def trace(frame: types.FrameType, event: str, argument: object) -> Any:
        nonlocal left, ran
        if frame.f_code not in codes:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= dis.opname[ran].startswith("CALL")
            ran = frame.f_code.co_code[frame.f_lasti]
            if left == 0:
                raise KeyboardInterrupt
        return trace

    return trace


def summary() -> tuple[object, ...]:
    names = formats.names()
    registry = plugins.load()
    return names, registry.rows, [*registry.backends], [*registry.recipes], registry.formats


def reloaded() -> None:
    plugins.load()
    plugins.reload()


@pytest.mark.parametrize("action", [plugins.load, reloaded, formats.names])
def test_ctrl_c_anywhere_leaves_nothing_half_loaded(
    action: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = [plugins._load, plugins._forget, formats._discover, formats.set_discovery]
    number, is_interrupted, seen = 0, True, []
    while is_interrupted:
        number, is_interrupted = number + 1, False
        with toys.isolation():
            sys.modules["toy_whole"] = toys.whole_plugin()
            os.environ["FP8CORE_PLUGINS"] = "toy_whole"
            outer = sys.gettrace()
            sys._getframe().f_trace_opcodes = True  # Python 3.12 asks for it before it traces
            sys.settrace(interrupt_at(number, kept))
            try:
                action()
            except KeyboardInterrupt:
                is_interrupted = True
            finally:
                sys.settrace(outer)
            seen.append(summary())
            del os.environ["FP8CORE_PLUGINS"]
    assert number > 5
    assert {str(own) for own in seen} == {str(seen[-1])}
