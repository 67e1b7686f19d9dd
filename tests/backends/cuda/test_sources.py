"""The layers of csrc, told from includes: include, cuda, apis, bindings, each below the next."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp8core_backends.cuda import build

LAYERS = ("include", "cuda", "apis", "bindings")
ROOT = build.sources()
FILES = build._files(ROOT)


def layer_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0]


def includes(file: Path) -> list[str]:
    """Return what a file includes: paths of our own as they lie in csrc, others as written."""
    found = []
    for kind, name in re.findall(r'^#include ([<"])(.+)[>"]', file.read_text(), re.MULTILINE):
        beside = (file.parent / name).resolve()
        ours = beside if beside.exists() else ROOT / "include" / name
        found.append(ours.relative_to(ROOT).as_posix() if kind == '"' else name)
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_a_file_includes_its_own_layer_and_those_below(file: Path) -> None:
    assert layer_of(file) in LAYERS
    for name in includes(file):
        if (ROOT / name).exists():
            assert LAYERS.index(layer_of(ROOT / name)) <= LAYERS.index(layer_of(file)), name


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.relative_to(ROOT).as_posix())
def test_the_bindings_alone_know_python_and_nobody_knows_torch(file: Path) -> None:
    names = includes(file)
    assert not any(name.startswith(("torch/", "ATen/", "c10/")) for name in names)
    knows_python = any(name.startswith(("pybind11/", "Python.h")) for name in names)
    assert not knows_python or layer_of(file) == "bindings"


@pytest.mark.parametrize("source", build._VARIANTS)
def test_a_source_of_variants_says_which_macro_is_missing(source: str) -> None:
    text = (ROOT / source).read_text()
    for variant in build._VARIANTS[source]:
        for macro in variant:
            name = macro.removeprefix("-D").split("=")[0]
            assert f"defined({name})" in text or f"#ifndef {name}" in text
