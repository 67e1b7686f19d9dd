"""Every way to run a layer gives the bits of the plain one: outputs, gradients and buffers.

The plain way remembers no call, and a Transformer layer runs its layers one after the other.
Recipes and ways are crossed in full; the combinations of a layer's options, which have each pair
of two options' values, take turns.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch

from tests import ways
from tests.recording_backend import Program, install
from tests.ways import DEVICE, LAYERS, MAIN, MORE, RECIPES, WAYS, Options, Run

OTHER_WAYS = [way for way in WAYS if way != "plain"]
COMPOSED = ("MultiheadAttention", "TransformerLayer")
SAME_STRIDES = ("remembered", "hooked", "monitored", "recorded")
Case = tuple[str, str, str, int]


@functools.cache
def options_of(kind: str) -> list[Options]:
    return LAYERS[kind].options()


@functools.cache
def ran(kind: str, name: str, way: str, at: int) -> Run:
    """The run with the options of that number, once for all tests."""
    return ways.run(kind, name, options_of(kind)[at], WAYS[way])


def cases(kinds: Iterable[str]) -> list[Case]:
    """Each recipe in each way, with the next combination of options of ``kinds`` that has both."""
    rows = [(kind, at) for kind in kinds for at in range(len(options_of(kind)))]
    found: list[Case] = []
    for number, (name, way) in enumerate(itertools.product(RECIPES, OTHER_WAYS)):
        first = number + number // len(OTHER_WAYS)  # no way always with the same options
        for turn in range(first, first + len(rows)):
            kind, at = rows[turn % len(rows)]
            if ways.is_offered(kind, name, way, options_of(kind)[at]):
                found.append((kind, name, way, at))
                break
    return found


CASES = [*(case for kind in MAIN for case in cases([kind])), *cases(MORE)]
# A graph takes as long as ten other cases; half of them have each layer and each recipe.
SLOW = [case for case in CASES if case[2] == "compiled"][1::2]


@pytest.fixture(autouse=True)
def recording_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def strides(run: Run) -> list[tuple[int, ...] | None]:
    return [None if tensor is None else tensor.stride() for tensor in run.results]


def assert_same(ours: Run, theirs: Run) -> None:
    for at, (mine, wanted) in enumerate(zip(ours.results, theirs.results, strict=True)):
        assert (mine is None) == (wanted is None), at
        if mine is not None and wanted is not None:
            torch.testing.assert_close(mine, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing when gradients:UserWarning")
@pytest.mark.parametrize(
    ("kind", "name", "way", "at"),
    [pytest.param(*case, marks=pytest.mark.slow if case in SLOW else ()) for case in CASES],
)
def test_a_way_gives_the_bits_of_the_plain_one(kind: str, name: str, way: str, at: int) -> None:
    ours, theirs = ran(kind, name, way, at), ran(kind, name, "plain", at)
    assert_same(ours, theirs)
    if way in SAME_STRIDES:
        assert strides(ours) == strides(theirs)
    is_expected = is_expected_to_hold(ours.held, theirs.held, kind, way, options_of(kind)[at])
    assert is_expected, (ours.held, theirs.held)


def is_expected_to_hold(ours: int, plain: int, kind: str, way: str, options: Options) -> bool:
    """Whether the bytes that a way's forward keeps for backward are its figure."""
    elements = ways.MICROBATCHES * sum(map(math.prod, LAYERS[kind].shapes))
    match way:
        case "checkpointed" | "checkpointed_reentrantly":  # the inputs alone
            return ours == elements * options["params_dtype"].itemsize
        case "offloaded":
            return ours == 0
        case "compiled":  # scales and sizes of groups by themselves, and views as copies
            return ours <= 2 * plain + 1024 or DEVICE.type != "cpu"
        case _ if options.get("save_original_input"):  # which is wider than its codes
            return True
        case "microbatched":  # a weight's codes once
            return ours <= plain
        case _ if any(options.get(name) not in (None, False, "fastest") for name in ways.NOT_PLAIN):
            return ours <= plain
        case "remembered" | "recorded" if kind in COMPOSED or DEVICE.type != "cpu":
            return ours <= plain  # as one chain, or in the memory of a graph
    return ours == plain


@pytest.mark.skipif(DEVICE.type != "cpu", reason="counts the runs of a backend for the CPU")
@pytest.mark.parametrize("name", ["delayed", "current", "block", "mxfp8", "rowwise"])
@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP", "TransformerLayer"])
def test_calls_are_repeated_from_a_recording(
    kind: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    repeats, repeat = [], Program.__call__

    def noted(program: Program, *arguments: Any) -> Any:
        repeats.append(program)
        return repeat(program, *arguments)

    monkeypatch.setattr(Program, "__call__", noted)
    options: Options = {"params_dtype": torch.float32}
    if kind == "TransformerLayer":  # torch puts three weights together before the chain
        options |= {"fuse_qkv_params": True, "hidden_dropout": 0.0}
    plain = ways.run(kind, name, options, ways.plain)
    assert not repeats
    recorded = ways.run(kind, name, options, ways.recorded)
    assert len(repeats) > len({*map(id, repeats)}) >= 2  # forward's and backward's
    assert recorded.held <= plain.held


@pytest.mark.needs_accelerator("cuda")
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("kind", MAIN)
def test_captured_steps_give_the_bits_of_the_plain_ones(kind: str, name: str) -> None:
    for options in map(ways.capturable, options_of(kind)):
        if not ways.is_offered(kind, name, "captured", options):
            continue
        samples = tuple(ways.inputs(kind, options, step=0))
        way = functools.partial(ways.captured, samples=samples, chosen=RECIPES[name])
        ours, theirs = (ways.run(kind, name, options, each, 1) for each in (way, ways.plain))
        assert_same(ours, theirs)
