"""Where results are allocated: on the tensors' device, whichever is current."""

from __future__ import annotations

import pytest
import torch

from fp8core_backends.cuda import memory

SIZE, STRIDE = (3, 4), (4, 1)


@pytest.mark.parametrize("current", [0, 1])
def test_the_quick_way_serves_the_current_device_alone(
    current: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def here(*arguments: object) -> None:
        asked.append(("here", *arguments))

    def anywhere(*arguments: object, **keywords: object) -> None:
        asked.append((*arguments, keywords))

    monkeypatch.setattr(memory, "_empty_here", here)
    monkeypatch.setattr(memory, "_current_device", lambda: current)
    monkeypatch.setattr(torch, "empty_strided", anywhere)
    memory.allocator(1)(SIZE, STRIDE, torch.uint8)
    elsewhere = {"dtype": torch.uint8, "device": torch.device("cuda", 1)}
    expected = ("here", SIZE, STRIDE, torch.uint8) if current else (SIZE, STRIDE, elsewhere)
    assert asked == [expected]


def test_without_the_quick_way_torch_s_public_one_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []
    monkeypatch.setattr(memory, "_empty_here", None)
    monkeypatch.setattr(torch, "empty_strided", lambda *given, **more: asked.append(given))
    memory.allocator(0)(SIZE, STRIDE, torch.float32)
    assert asked == [(SIZE, STRIDE)]


@pytest.mark.needs_accelerator("cuda")
def test_both_ways_make_the_same_tensor() -> None:
    made = memory.allocator(0)(SIZE, (1, 3), torch.bfloat16)
    assert (made.shape, made.stride(), made.dtype) == (SIZE, (1, 3), torch.bfloat16)
    assert made.device == torch.device("cuda", 0)
    with torch.inference_mode():
        assert memory.allocator(0)(SIZE, STRIDE, torch.uint8).is_inference()
