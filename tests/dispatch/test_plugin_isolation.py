"""What a plug-in may do to the process: nothing. Only the user's Ctrl-C goes through."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

import fp8core
from fp8core import formats, recipe
from fp8core.backend_api import OpDesc, hookimpl
from fp8core.dispatch import plugins, policy, select, table
from fp8core.doctor import consult
from fp8core.errors import PluginError, RecipeError, UnsupportedError
from tests import forked
from tests.dispatch import toys


def exits(*args: object, **kwargs: object) -> NoReturn:
    raise SystemExit(7)


# --- Ctrl-C while plug-ins load ---

WITH_FORMAT = """
from fp8core.backend_api import hookimpl
from fp8core.formats import FormatSpec, minifloat

@hookimpl
def fp8core_register_formats(register):
    values = minifloat("toy8", 3, 4, specials="finite").values
    # Another function each time: registered twice, it is another definition.
    register(FormatSpec("toy8", 8, values, "even", None, encoder=lambda x, rounding: x.byte()))

@hookimpl
def fp8core_select_backend(op):
    return None
"""
INTERRUPTED = """
import os, pathlib, signal, time
from fp8core.backend_api import hookimpl
mark = pathlib.Path(__file__).with_suffix(".mark")
if not mark.exists():
    mark.touch()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(10)

@hookimpl
def fp8core_doctor(report):
    report("toy_slow", "is here")
"""


@pytest.fixture
def interrupted(folder: Path, install: toys.Install) -> Iterator[Path]:
    """Have the user press Ctrl-C while the second plug-in is imported for the first time."""
    # A shell has its background jobs ignore it, and their children.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    install(toy_format=WITH_FORMAT, toy_slow=INTERRUPTED)
    yield folder
    signal.signal(signal.SIGINT, before)


FIRST_USES: dict[str, Callable[[], object]] = {
    "load": plugins.load,
    "a format": lambda: formats.by_name("toy8"),
    "the formats": formats.names,
    "a choice": lambda: select.choose(toys.GEMM, toys.CPU, policy.current()),
    "a layer": lambda: fp8core.Linear(32, 32)(torch.ones(32, 32)),
}


@pytest.mark.parametrize("use", FIRST_USES)
def test_ctrl_c_reaches_the_user_and_the_next_use_discovers_anew(
    use: str, interrupted: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        FIRST_USES[use]()
    assert "toy8" not in formats._formats
    FIRST_USES[use]()
    rows = plugins.load().rows
    assert [(row.name, row.reason) for row in rows] == [
        ("reference", None),
        ("toy_format", None),
        ("toy_slow", None),
    ]
    assert "toy8" in formats.names()
    asked = plugins.load().manager.hook.fp8core_select_backend.get_hookimpls()
    assert [one.plugin_name for one in asked] == ["toy_format"]


def test_ctrl_c_in_a_process_of_its_own(interrupted: Path) -> None:
    code = (
        "import json, signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        f"sys.path.insert(0, {str(interrupted)!r})\n"
        "import fp8core\n"
        "from fp8core.dispatch import plugins\n"
        "try:\n    fp8core.formats.names()\n    said = 'nothing'\n"
        "except KeyboardInterrupt:\n    said = 'interrupted'\n"
        "rows = [[row.name, row.reason] for row in plugins.load().rows]\n"
        "print(json.dumps([said, rows, list(fp8core.formats.names())]))"
    )
    ran = forked.run([sys.executable, "-c", code], timeout=120)
    assert ran.returncode == 0, ran.stderr
    said, rows, names = json.loads(ran.stdout)
    assert said == "interrupted"
    assert ["toy_format", None] in rows
    assert ["toy_slow", None] in rows
    assert "toy8" in names


@pytest.mark.parametrize("where", ["probe", "factory", "unsupported", "bind"])
def test_ctrl_c_in_a_backend_reaches_the_user(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object) -> NoReturn:
        raise KeyboardInterrupt

    spec = toys.backend("toy", **interruptible(where, interrupt))
    if where == "factory":
        monkeypatch.setattr(sys.modules["toy_backend_toy"], "Made", interrupt)
    toys.register(spec)
    with fp8core.use_backend("toy"), pytest.raises(KeyboardInterrupt):
        table.resolve(toys.AMAX, toys.CPU)


@pytest.mark.parametrize("raised", [SystemExit(0), TimeoutError("too long")])
def test_what_the_programs_signal_handler_raises_reaches_it(raised: BaseException) -> None:
    def handle(number: int, frame: object) -> NoReturn:
        raise raised

    def probe() -> str | None:
        signal.raise_signal(signal.SIGUSR1)
        time.sleep(1)
        return None

    toys.register(toys.backend("toy", probe=probe, priority=9))
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with pytest.raises(type(raised)):
            select.choose(toys.GEMM, toys.CPU, policy.current())
    finally:
        signal.signal(signal.SIGUSR1, before)


def interruptible(where: str, function: Callable[..., Any]) -> dict[str, Any]:
    named = {"probe": "probe", "unsupported": "refuse", "bind": "bind"}
    return {named[where]: function} if where in named else {}


def test_ctrl_c_while_one_is_registered_by_hand_keeps_nothing_of_it() -> None:
    def interrupt(register: object) -> NoReturn:
        raise KeyboardInterrupt

    toy = toys.plugin(own_formats=[toys.TOY8])
    toy.fp8core_register_recipes = hookimpl(interrupt)  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        plugins.register(toy, "toy")
    toy.fp8core_register_recipes = toys.plugin().fp8core_register_recipes  # type: ignore[attr-defined]
    plugins.register(toy, "toy")
    assert plugins.load().rows[-1].name == "toy"


def test_reloading_forgets_the_formats_of_plugins(
    monkeypatch: pytest.MonkeyPatch, install: toys.Install
) -> None:
    install(toy_format=WITH_FORMAT)
    assert "toy8" in formats.names()
    assert plugins.reload().rows[1].reason is None  # no clash with its own format of before
    monkeypatch.setenv("FP8CORE_PLUGINS", "")
    plugins.reload()
    assert "toy8" not in formats.names()


def test_reloading_keeps_the_formats_of_the_program() -> None:
    formats.register(toys.TOY8)
    plugins.register(toys.plugin(own_formats=[toys.TOY8]), "toy")
    plugins.reload()
    assert "toy8" in formats.names()


# --- a backend that ends the process, or answers nonsense ---


class Unprintable(str):
    """A reason whose text can only be looked at."""

    __slots__ = ()
    __str__ = __repr__ = __format__ = exits


@pytest.mark.parametrize(
    ("refuse", "said"),
    [
        (exits, "its unsupported() failed: SystemExit: 7"),
        (
            lambda desc: False,
            "its unsupported() returned False; expected a reason as a text, or None",
        ),
        (lambda desc: "", "its unsupported() returned ''; expected a reason as a text, or None"),
        (lambda desc: Unprintable("no"), "no"),
    ],
)
def test_whatever_unsupported_does_is_a_reason(refuse: Callable[..., Any], said: str) -> None:
    toys.register(toys.backend("toy", refuse=refuse, priority=9))
    choice = select.choose(toys.GEMM, toys.CPU, policy.current())
    assert (choice.backend, choice.verdicts[0].reason) == ("reference", said)
    assert f"toy: {said}" in str(choice)


@pytest.mark.parametrize("failure", [SystemExit(7), GeneratorExit("x"), OSError("no compiler")])
def test_a_failing_bind_is_an_error_that_names_the_backend(failure: BaseException) -> None:
    def bind(backend: toys.ToyBackend, desc: OpDesc, device: torch.device) -> NoReturn:
        raise failure

    toys.register(toys.backend("toy", bind=bind, priority=9))
    said = f"toy says that it runs .*, but its bind.. failed: {type(failure).__name__}: "
    with pytest.raises(PluginError, match=said) as caught:
        table.resolve(toys.AMAX, toys.CPU)
    assert caught.value.__cause__ is failure


def test_an_error_of_our_own_from_bind_stays_what_it_is() -> None:
    def bind(backend: toys.ToyBackend, desc: OpDesc, device: torch.device) -> NoReturn:
        raise UnsupportedError("no compiler here")

    toys.register(toys.backend("toy", bind=bind, priority=9))
    with pytest.raises(UnsupportedError, match=r"^no compiler here$"):
        table.resolve(toys.AMAX, toys.CPU)


def test_a_bind_that_returns_nothing_to_call_is_an_error_that_names_the_backend() -> None:
    toys.register(toys.backend("toy", bind=lambda backend, desc, device: None, priority=9))  # type: ignore[arg-type,return-value]
    with pytest.raises(
        PluginError, match=r"toy .* its bind\(\) returned None; expected a function"
    ):
        table.resolve(toys.AMAX, toys.CPU)


def test_explain_names_a_bind_that_exits() -> None:
    toys.register(toys.backend("toy", bind=exits, priority=9))
    said = str(fp8core.explain("amax", recipe.by_name("current"), device="cpu"))
    assert "but its bind() failed: SystemExit: 7" in said


@pytest.mark.parametrize("failure", [exits, lambda: 1 / 0])
def test_a_recipe_whose_factory_fails_is_an_error_that_names_it(
    failure: Callable[[], Any],
) -> None:
    toys.register(recipes={"toy": failure})
    with pytest.raises(PluginError, match="recipe 'toy': its factory failed: "):
        recipe.by_name("toy")


# --- hooks that are called later ---


def policy_plugin(answer: Callable[[], Any]) -> None:
    plugins.register(toys.plugin(fp8core_select_backend=lambda op: answer()), "toy")


@pytest.mark.parametrize("failure", [exits, lambda: 1 / 0])
def test_a_failing_site_policy_is_an_error_that_names_the_plugin(
    failure: Callable[[], Any],
) -> None:
    plugins.register(toys.plugin(fp8core_select_backend=lambda desc: None), "quiet")
    policy_plugin(failure)
    with pytest.raises(PluginError) as caught:
        select.choose(toys.GEMM, toys.CPU, policy.current())
    said = str(caught.value)
    assert said.startswith("plug-in toy: its fp8core_select_backend failed for GemmDesc")
    assert "FP8CORE_DISABLE_PLUGINS=toy" in said


@pytest.mark.parametrize("answer", [3, ["reference"], "nobody", torch.ones(2)])
def test_a_site_policy_that_picks_nonsense_is_named(answer: Any) -> None:
    policy_plugin(lambda: answer)
    with pytest.raises(UnsupportedError, match=r"site policy picks .* \(plug-in toy\).*reference"):
        select.choose(toys.GEMM, toys.CPU, policy.current())


def test_a_backend_that_is_asked_for_by_name_does_not_ask_the_site_policy() -> None:
    policy_plugin(exits)
    with fp8core.use_backend("reference"):
        assert select.choose(toys.GEMM, toys.CPU, policy.current()).backend == "reference"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (exits, ["plug-in toy: its fp8core_select_backend failed"]),
        (lambda: "nobody", ["'nobody'", "plug-in toy"]),
        (lambda: None, []),
    ],
)
def test_the_doctor_shows_a_site_policy_that_fails(
    answer: Callable[[], Any], said: list[str]
) -> None:
    policy_plugin(answer)
    notes = consult.here()
    assert any(all(words in note for words in said) for note in notes) == bool(said)
    assert bool(notes) == bool(said)


def test_exit_in_a_doctor_hook_is_a_note() -> None:
    plugins.register(toys.plugin(fp8core_doctor=lambda report: exits()), "toy")
    assert consult.here() == ["plug-in toy: its fp8core_doctor failed: SystemExit: 7"]


# --- a name in FP8CORE_PLUGINS that nobody has ---


@pytest.mark.parametrize("name", ["toy_nope", "toy_nope.below", "torch.toy_nope", "..toy", "toy_"])
def test_a_module_that_does_not_exist_is_an_error_that_lists_what_does(
    name: str, monkeypatch: pytest.MonkeyPatch, install: toys.Install
) -> None:
    install(toy_format=WITH_FORMAT)
    monkeypatch.setenv("FP8CORE_PLUGINS", f"{name},toy_format")
    for _ in range(2):  # nothing is half loaded after the first
        with pytest.raises(RecipeError) as caught:
            fp8core.Linear(16, 16, device="cpu")(torch.ones(1, 16))
        said = str(caught.value)
        assert f"FP8CORE_PLUGINS names {name!r}, but there is no module of that name" in said
        assert "reference" in said
        assert "toy_format" in said
    assert "toy8" not in formats._formats
    monkeypatch.setenv("FP8CORE_PLUGINS", "toy_format")
    assert [row.reason for row in plugins.load().rows] == [None, None]


def test_the_name_of_an_installed_plugin_is_recognized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8CORE_PLUGINS", "referense")
    with pytest.raises(RecipeError, match="Did you mean 'reference'"):
        plugins.load()


def test_a_disabled_name_need_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8CORE_PLUGINS", "toy_nope")
    monkeypatch.setenv("FP8CORE_DISABLE_PLUGINS", "toy_nope")
    assert plugins.load().rows[1].reason == "disabled by FP8CORE_DISABLE_PLUGINS"


def test_a_module_that_lacks_another_is_a_row(install: toys.Install) -> None:
    install(toy_lacking="import toy_lacking_more")
    assert "No module named 'toy_lacking_more'" in (plugins.load().rows[1].reason or "")
