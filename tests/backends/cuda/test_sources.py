"""The layers of csrc, told from includes: include, cuda, apis, bindings, each below the next."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_a_file_includes_its_own_layer_and_those_below() -> None:
    assert {layer_of(file) for file in FILES} == set(LAYERS)
    above = [
        f"{file.relative_to(ROOT)} includes {name}"
        for file in FILES
        for name in includes(file)
        if (ROOT / name).exists()
        and LAYERS.index(layer_of(ROOT / name)) > LAYERS.index(layer_of(file))
    ]
    assert above == []


def test_the_bindings_alone_know_python_and_nobody_knows_torch() -> None:
    everyone = {(file, name) for file in FILES for name in includes(file)}
    assert [one for one in everyone if one[1].startswith(("torch/", "ATen/", "c10/"))] == []
    python = {file for file, name in everyone if name.startswith(("pybind11/", "Python.h"))}
    assert {layer_of(file) for file in python} == {"bindings"}


def test_headers_of_entries_show_them_to_the_bindings() -> None:
    for header in (ROOT / "include").rglob("*.h"):
        opened = re.findall(r"^namespace fp8core.*{$", header.read_text(), re.MULTILINE)
        hidden = [line for line in opened if "FP8CORE_EXPORTED" not in line]
        assert (len(opened) == 1) == (not hidden) or header.name == "check.h", header
    assert any("-fvisibility=hidden" in flag for flag in build._FLAGS)


def test_a_source_of_variants_says_which_macro_is_missing() -> None:
    silent = []
    for source, variants in build._VARIANTS.items():
        text = (ROOT / source).read_text()
        names = {macro.removeprefix("-D").split("=")[0] for one in variants for macro in one}
        assert names, source
        silent += [
            f"{source}: {name}"
            for name in sorted(names)
            if f"defined({name})" not in text and f"#ifndef {name}" not in text
        ]
    assert silent == []
