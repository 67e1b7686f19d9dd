"""Which library is used where one is installed, and what the doctor says of it."""

from __future__ import annotations

import importlib
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8core import UnsupportedError
from fp8core_backends.cuda import build, native, origin, settings

SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
VERSION = build.origin_of(None, ()).version

pytestmark = pytest.mark.usefixtures("unloaded")


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Put a library for 8.0 and 9.0 by CUDA 13 among the packages, and return its extension."""
    monkeypatch.syspath_prepend(tmp_path / "site")

    def put(package: str = "fp8core_cuda", suffix: str = SUFFIX, **other: object) -> Path:
        made = build.origin_of("13.0", ("80", "90a"))._replace(**other)
        folder = tmp_path / "site" / package
        folder.mkdir(parents=True)
        for name in ("__init__.py", build.KERNELS, f"{build.MODULE}{suffix}"):
            (folder / name).touch()
        (folder / origin.NAME).write_text(made.text())
        importlib.invalidate_caches()  # which the folder may be too new for
        return folder / f"{build.MODULE}{SUFFIX}"

    return put


@pytest.fixture
def torch_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Have torch be one for a CUDA."""

    def say(cuda: str) -> None:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        native._source.cache_clear()

    say("13.0")
    return say


def source(*architectures: str) -> native._Source:
    return native._source(architectures or ("90a",), settings.read())


def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "find_toolchain", lambda: "no nvcc in sight")
    native._source.cache_clear()


def test_an_installed_library_is_used_before_one_that_was_built(
    compiler: Path, install: Callable[..., Path], torch_of: Callable[[str], None]
) -> None:
    built = build.build(("90a",))
    assert source().description == f"built earlier: {built}"
    native._source.cache_clear()
    installed = install()
    assert source() == native._Source(installed, f"installed: {installed}", None)


UNSUITED: dict[str, tuple[dict[str, Any], str]] = {
    "another version": (
        {"version": "0.0.9", "sources": "older"},
        f"was built from other sources, fp8core 0.0.9 (older); these are {VERSION} "
        f"({build.source_hash()}): install fp8core-cuda=={VERSION}",
    ),
    "another CUDA": (
        {"cuda": "12.9"},
        f"is for CUDA 12, torch uses 13.0: install fp8core-cuda=={VERSION}",
    ),
    "a CUDA to come": (
        {"cuda": "130.1"},
        f"is for CUDA 130, torch uses 13.0: install fp8core-cuda=={VERSION}",
    ),
    "another architecture": (
        {"architectures": ("80", "100f")},
        "was built for 80 100f, this machine takes 90a: build it with --arch 100f 80 90a",
    ),
    "another Python": (
        {"suffix": ".cpython-399-x86_64-linux-gnu.so"},
        f"has no extension for this Python ({SUFFIX[1:]}), only cpython-399-x86_64-linux-gnu.so",
    ),
}


@pytest.mark.usefixtures("torch_of")
@pytest.mark.parametrize(("other", "why"), UNSUITED.values(), ids=UNSUITED)
def test_an_installed_library_that_does_not_suit_is_passed_over_by_name(
    other: dict[str, Any],
    why: str,
    compiler: Path,
    install: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = f"{install(**other)} is installed, but {why}"
    found = source()
    assert found.path is None
    assert found.description == f"built with {compiler / 'nvcc'} on first use ({said})"
    with pytest.raises(UnsupportedError, match=r"cannot be loaded"):  # what was pretended to be
        native.load()
    assert f"fp8core: the native library is {found.description}" in capsys.readouterr().err
    native._source.cache_clear()
    built = build.target(("90a",))
    assert source() == native._Source(built, f"built earlier: {built} ({said})", None)


@pytest.mark.usefixtures("torch_of")
@pytest.mark.parametrize(("other", "why"), UNSUITED.values(), ids=UNSUITED)
def test_where_no_other_can_be_had_that_is_an_error(
    other: dict[str, Any],
    why: str,
    compiler: Path,
    install: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said = f"{install(**other)} is installed, but {why}"
    without_compiler(monkeypatch)
    found = source()
    assert (found.path, found.why_not) == (None, None)  # not a reason to run other kernels
    assert found.description == f"refused: {found.refused}"
    with pytest.raises(UnsupportedError) as caught:
        native.load()
    assert str(caught.value) == (
        f"cuda: {said}. None can be built: no nvcc in sight. FP8CORE_BUILD=0 uses torch's kernels."
    )
    monkeypatch.setenv("FP8CORE_BUILD", "0")
    assert source().why_not == f"FP8CORE_BUILD=0 forbids building it ({said})"


def test_of_two_that_are_installed_the_one_for_torch_s_cuda_is_used(
    install: Callable[..., Path],
    torch_of: Callable[[str], None],
    compiler: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    without_compiler(monkeypatch)
    of_13, of_12 = install(), install("fp8core_cuda_cu12", cuda="12.9")
    for cuda, path in {"13.0": of_13, "13.2": of_13, "12.8": of_12, "12.9": of_12}.items():
        torch_of(cuda)
        assert source() == native._Source(path, f"installed: {path}", None)
    torch_of("14.0")
    assert "torch uses 14.0: install fp8core-cuda" in source().description


def test_the_kernels_take_no_torch_of_an_older_cuda(
    install: Callable[..., Path], torch_of: Callable[[str], None], compiler: Path
) -> None:
    install("fp8core_cuda_cu12", cuda="12.9")
    torch_of("12.6")
    assert source().why_not == "torch uses CUDA 12.6, the kernels 12.8 or later"


@pytest.mark.usefixtures("compiler", "torch_of")
@pytest.mark.parametrize("text", ["", "[]", "7", "{}", '{"version": 1}', "{'no': json}"])
def test_a_damaged_origin_is_named(
    text: str, install: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    without_compiler(monkeypatch)
    path = install()
    path.with_name(origin.NAME).write_text(text)
    assert f"{path} is installed, but has a damaged origin.json" in source().description


@pytest.mark.usefixtures("compiler", "torch_of")
def test_a_library_that_says_nothing_is_asked_when_it_is_loaded(
    install: Callable[..., Path],
) -> None:
    path = install(sources="older")
    path.with_name(origin.NAME).unlink()
    assert source() == native._Source(path, f"installed: {path}", None)


@pytest.mark.usefixtures("torch_of")
def test_the_doctor_names_the_library_of_each_device(
    install: Callable[..., Path], compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capabilities = [(9, 0), (8, 6), (7, 5)]
    monkeypatch.undo()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.syspath_prepend(compiler.parent / "site")
    monkeypatch.setattr(build, "find_toolchain", lambda: "no nvcc in sight")
    monkeypatch.setenv("FP8CORE_CACHE_DIR", str(compiler.parent / "cache"))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(
        torch.cuda,
        "get_device_capability",
        lambda at: capabilities[at if isinstance(at, int) else at.index],
    )
    path = install()
    first, second, third = native.status().split("; cuda:")
    assert first == f"cuda:0 installed: {path}"
    assert second == f"1 installed: {path}"
    assert third.startswith("2 none (the kernels are written for compute capability 8.0")
    capabilities[1] = (8, 9)  # one library serves all devices, and this one has no code for it
    assert "was built for 80 90a, this machine takes 89 90a" in native.status()


def test_a_library_whose_cuda_is_not_there_says_what_torch_has(
    monkeypatch: pytest.MonkeyPatch, torch_of: Callable[[str], None]
) -> None:
    lacks = "libcudart.so.13: cannot open shared object file: No such file or directory"

    def fail(spec: object) -> None:
        raise ImportError(lacks)

    monkeypatch.setattr(native.importlib.util, "module_from_spec", fail)
    with pytest.raises(UnsupportedError) as caught:
        native._import(Path("a.so"))
    assert str(caught.value).endswith(
        f"a.so cannot be loaded: {lacks}. CUDA's libraries come with torch, and torch "
        f"{torch.__version__} has those of CUDA 13.0."
    )
