"""What belongs to a tensor is found while the tensor lives and is not written."""

from __future__ import annotations

import gc

import torch

from fp8core.torch_ops.companions import Companions


def test_the_companion_of_a_tensor_is_found() -> None:
    held: Companions[str] = Companions()
    one, other = torch.zeros(3), torch.zeros(3)
    held.put(one, "one")
    held.put(other, "other")
    assert (held.get(one), held.get(other)) == ("one", "other")


def test_an_equal_tensor_has_none() -> None:
    held: Companions[str] = Companions()
    x = torch.zeros(3)
    held.put(x, "x")
    assert held.get(x.view(3)) is None


def test_a_write_ends_it() -> None:
    held: Companions[str] = Companions()
    x = torch.zeros(3)
    held.put(x, "x")
    x[1] = 1.0
    assert held.get(x) is None
    held.put(x, "again")
    assert held.get(x) == "again"


def test_the_end_of_a_tensor_is_that_of_its_companion() -> None:
    held: Companions[list[int]] = Companions()
    for _ in range(3):
        held.put(torch.zeros(3), [1])
    gc.collect()
    assert len(held) == 0


def test_a_tensor_whose_writes_are_not_counted_has_none() -> None:
    held: Companions[str] = Companions()
    with torch.inference_mode():
        x = torch.zeros(3)
        held.put(x, "x")
    assert held.get(x) is None
