"""The page about the architecture names rooms, functions and words that the code has."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path
from types import FrameType

import torch

import fp8core
from fp8core import recipe
from tests.docs.pages import DOCS, ROOT, tables
from tests.test_layering import FLOORS

PAGE = DOCS / "architecture.md"
TEXT = PAGE.read_text(encoding="utf-8")
PACKAGE = Path(fp8core.__file__).parent


def section(title: str) -> str:
    """Return the text of the page below the heading ``title``."""
    _, _, rest = TEXT.partition(f"\n## {title}\n")
    return rest.partition("\n## ")[0]


def code_in(text: str) -> list[str]:
    return re.findall(r"`([^`\n]+)`", text)


def test_rooms_of_the_page_are_the_floors_of_the_library_in_their_order() -> None:
    (rooms,) = tables(section("Rooms"))
    named = [
        match[1]
        for row in rooms[2:]
        for code in code_in(row.cells[1])
        if (match := re.match(r"fp8core/(\w+)", code))
    ]
    floor_of = {
        name: floor
        for floor, names in enumerate(FLOORS)
        for name in names
        if not name.startswith("__")
    }
    assert sorted(named) == sorted(floor_of)
    assert [floor_of[name] for name in named] == sorted(floor_of.values())


def test_every_path_of_the_page_is_there() -> None:
    paths = re.findall(r"(?:fp8core|backends|csrc|tests|fp8core_pytest)/[\w/.]*", TEXT)
    assert len(paths) > 60
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_every_word_is_defined_where_the_page_says() -> None:
    (words,) = tables(section("Words"))
    missing = []
    for row in words[2:]:
        (place,) = code_in(row.cells[2])
        module, _, name = place.rpartition(".")
        if not hasattr(importlib.import_module(module), name):
            missing.append(place)
    assert missing == []


def test_one_step_of_a_linear_calls_the_functions_in_the_order_of_the_page() -> None:
    steps, _ = tables(section("One step of a Linear"))
    listed = [code_in(row.cells[0])[0] for row in steps[2:]]
    called: dict[str, None] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            module = path.relative_to(PACKAGE.parent).with_suffix("")
            called.setdefault(".".join((*module.parts, frame.f_code.co_name)))

    layer = fp8core.Linear(64, 32, device="cpu")
    x = torch.randn(16, 64, device="cpu", requires_grad=True)
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(note)
        try:
            with fp8core.autocast(recipe=recipe.Float8CurrentScaling()):
                y = layer(x)
            y.sum().backward()
        finally:
            sys.setprofile(None)
    assert [name for name in called if name in listed] == listed
