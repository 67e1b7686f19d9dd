"""The FP8CORE_* variables: what they mean, and what a misspelt one gets."""

from __future__ import annotations

import logging

import pytest

from fp8core.backend_api import OPS
from fp8core.dispatch import plugins, settings
from fp8core.errors import RecipeError
from tests.dispatch import toys


def test_no_variable_gives_the_defaults() -> None:
    assert settings.read({}) == settings.Settings()


def test_empty_variables_give_the_defaults() -> None:
    assert settings.read(dict.fromkeys(settings.VARIABLES, "")) == settings.Settings()


def test_variable_is_parsed() -> None:
    for line, expected in (
        ("FP8CORE_BACKEND= toy ", settings.Settings(backend="toy")),
        ("FP8CORE_STRICT=1", settings.Settings(strict=True)),
        ("FP8CORE_STRICT=0", settings.Settings(strict=False)),
        ("FP8CORE_PLUGINS=a.b, c,", settings.Settings(plugins=("a.b", "c"))),
        ("FP8CORE_DISABLE_PLUGINS=x,y", settings.Settings(disabled_plugins=("x", "y"))),
        (
            "FP8CORE_OP_BACKEND=gemm=toy, quantize = reference",
            settings.Settings(op_backends=(("gemm", "toy"), ("quantize", "reference"))),
        ),
    ):
        name, _, value = line.partition("=")
        assert settings.read({name: value}) == expected, line


def test_strict_takes_0_or_1_alone() -> None:
    for value in ("yes", "true", "2", " 1"):
        with pytest.raises(RecipeError, match=r"FP8CORE_STRICT=.*expected 0 or 1"):
            settings.read({"FP8CORE_STRICT": value})


def test_op_backend_without_both_sides_is_refused() -> None:
    for value in ("gemm", "gemm=", "=toy", "gemm:toy"):
        with pytest.raises(RecipeError, match=r"FP8CORE_OP_BACKEND=.*expected op=backend"):
            settings.read({"FP8CORE_OP_BACKEND": value})


def test_unknown_operation_in_op_backend_gets_the_list_and_the_nearest() -> None:
    with pytest.raises(RecipeError) as caught:
        settings.read({"FP8CORE_OP_BACKEND": "gem=toy"})
    message = str(caught.value)
    assert "FP8CORE_OP_BACKEND" in message
    assert ", ".join(OPS) in message
    assert "Did you mean 'gemm'?" in message


def test_invalid_setting_stops_no_later_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8CORE_STRICT", "perhaps")
    with pytest.raises(RecipeError, match="FP8CORE_STRICT"):
        plugins.load()
    monkeypatch.delenv("FP8CORE_STRICT")
    assert "reference" in plugins.load().backends


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("FP8CORE_BACKENDS", "FP8CORE_BACKEND"),
        ("FP8CORE_STRCT", "FP8CORE_STRICT"),
        ("FP8CORE_OPBACKEND", "FP8CORE_OP_BACKEND"),
        ("FP8CORE_DISABLE_PLUGIN", "FP8CORE_DISABLE_PLUGINS"),
    ],
)
def test_unknown_name_warns_with_the_nearest(
    name: str, nearest: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(name, "1")
    with caplog.at_level(logging.WARNING, logger="fp8core"):
        plugins.load()
    assert caplog.messages == [f"{name} is set, but nothing reads it. Did you mean {nearest!r}?"]


def test_unknown_name_warns_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FP8CORE_BACKND", "1")
    with caplog.at_level(logging.WARNING, logger="fp8core"):
        plugins.load()
        plugins.load()
    assert len(caplog.messages) == 1


def test_known_names_do_not_warn(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in settings.VARIABLES:
        monkeypatch.setenv(name, "")
    with caplog.at_level(logging.WARNING, logger="fp8core"):
        plugins.load()
    assert caplog.messages == []


def test_name_that_a_backend_declares_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8CORE_TOY_TILES", "4")
    toys.register(toys.backend("toy", environment=("FP8CORE_TOY_TILES",)))
    assert plugins.load().complaints() == []


def test_nearest_name_may_be_one_that_a_backend_declares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FP8CORE_TOY_TILE", "4")
    toys.register(toys.backend("toy", environment=("FP8CORE_TOY_TILES",)))
    (complaint,) = plugins.load().complaints()
    assert complaint.endswith("Did you mean 'FP8CORE_TOY_TILES'?")


def test_disabling_a_plugin_that_is_not_there_warns_with_the_nearest(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("FP8CORE_DISABLE_PLUGINS", "refrence")
    with caplog.at_level(logging.WARNING, logger="fp8core"):
        plugins.load()
    (message,) = caplog.messages
    assert "FP8CORE_DISABLE_PLUGINS names 'refrence'" in message
    assert "Did you mean 'reference'?" in message
