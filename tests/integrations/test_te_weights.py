"""Quantized weights whose master copies are spread over ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import fp8core
from fp8core import OperandError, UnsupportedError, recipe
from fp8core.integrations.transformer_engine import weights
from fp8core.tensors.storage import PARTS
from tests.in_process import run_in_threads

RECIPES = {
    "delayed": recipe.DelayedScaling(),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "rowwise": recipe.by_name("rowwise"),
    "nvfp4": recipe.NVFP4BlockScaling(),
}
CUTS = (0, 1000, 1000, 256 * 160)  # the middle rank has nothing


def weight_of(name: str, value: torch.Tensor) -> Any:
    with fp8core.quantized_model_init(recipe=RECIPES[name]):
        layer = fp8core.Linear(256, 160, bias=False, params_dtype=torch.bfloat16)
    weight = layer.weight
    if name == "nvfp4":
        weight.update_usage(columnwise_usage=False)
    with torch.no_grad():
        weight.copy_(value)
    return weight


def gathered(found: list[Any], name: str) -> torch.Tensor:
    """Return the flat codes of all ranks, each from the rank that has them."""
    per_byte = 2 if name == "nvfp4" else 1
    edges = [cut // per_byte for cut in CUTS]
    flat = [weight._rowwise_data.reshape(-1) for weight in found]
    pieces = zip(flat, edges[:-1], edges[1:], strict=True)
    return torch.cat([codes[start:end] for codes, start, end in pieces])


@pytest.mark.parametrize("name", RECIPES)
def test_parts_of_ranks_are_a_weight_quantized_at_once(name: str) -> None:
    """The scales on each rank, and the codes of all ranks together; values that blocks share, of
    which one has an outlier, are cut anywhere."""
    before, master = torch.randn(160, 256), torch.randn(160, 256) * 0.1
    master[3, 200], master[100, 7], master[3, 229] = 30.0, -3.0, -0.0
    found = [weight_of(name, before) for _ in range(3)]

    def step(communicator: Any) -> None:
        rank = communicator.rank
        part = master.reshape(-1)[CUTS[rank] : CUTS[rank + 1]]
        arguments = (part, CUTS[rank]) if part.numel() else (None, None)
        weights.quantize_master_weights(
            [found[rank]], *([value] for value in arguments), communicator, None, True
        )

    run_in_threads(step, 3)
    want = weight_of(name, master.to(torch.bfloat16))
    codes = gathered(found, name)
    assert torch.equal(codes, want._rowwise_data.reshape(-1))
    for weight in found:
        weight._rowwise_data.copy_(codes.view_as(weight._rowwise_data))
        weights.post_all_gather_processing([weight])
        for part in PARTS:
            if part != "_columnwise_data":
                assert (
                    torch.equal(getattr(weight, part), getattr(want, part))
                    if getattr(want, part) is not None
                    else getattr(weight, part) is None
                )
    if name in ("mxfp8", "rowwise"):
        ranks = (torch.arange(160 * 256) >= CUTS[1]).view(160, 256).t()
        columns = [weight._columnwise_data for weight in (found[0], found[2])]
        assert torch.equal(torch.where(ranks, columns[1], columns[0]), want._columnwise_data)
    assert torch.equal(found[0].dequantize(), want.dequantize())


def test_columns_of_dequantized_rows_follow_the_rows_that_were_gathered() -> None:
    rows, columns = fp8core.MXFP8Quantizer("e5m2"), fp8core.MXFP8Quantizer("e4m3")
    source = {"columnwise_source": "rowwise_dequantized"}
    kinds = {"rowwise_quantizer": rows, "columnwise_quantizer": columns}
    quantizer = fp8core.HybridQuantizer(**kinds, **source)
    found = [quantizer(torch.randn(160, 256, dtype=torch.bfloat16)) for _ in range(3)]
    master = torch.randn(160, 256)

    def step(communicator: Any) -> None:
        at = communicator.rank
        part = master.reshape(-1)[CUTS[at] : CUTS[at + 1]]
        arguments = [found[at]], [part], [CUTS[at]], communicator
        with pytest.raises(UnsupportedError, match="manual_post_all_gather_processing=True"):
            weights.quantize_master_weights(*arguments)
        weights.quantize_master_weights(*arguments, None, True)

    run_in_threads(step, 3)
    codes = gathered(found, "mxfp8")
    want = quantizer(master.to(torch.bfloat16))
    for weight in found:
        weight._rowwise_data.copy_(codes.view_as(weight._rowwise_data))
        weights.post_all_gather_processing(weight)
        pairs = zip(weight.tensors(), want.tensors(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs)


def test_codes_lie_in_a_buffer_that_is_given() -> None:
    weight = weight_of("current", torch.randn(160, 256))
    values, buffer = weight.dequantize(), torch.zeros(160 * 256 + 7, dtype=torch.uint8)
    weights.replace_raw_data(weight, buffer[7:])
    assert torch.equal(weight.dequantize(), values)
    buffer.zero_()
    assert not weight.dequantize().any()
    layer = fp8core.Linear(256, 160, bias=False, params_dtype=torch.bfloat16)
    layer.weight = weight
    weight.data.copy_(values)
    assert buffer.any()
    with fp8core.autocast(recipe=RECIPES["current"]):
        x = torch.randn(32, 256, dtype=torch.bfloat16, requires_grad=True)
        before = layer(x)
        weight.data.copy_(-values)
        assert torch.equal(layer(x), -before)


def test_codes_of_a_part_go_to_a_shard_instead() -> None:
    master = torch.randn(160, 256)
    weight = weight_of("current", torch.zeros(160, 256))
    shard, before = torch.zeros(500, dtype=torch.uint8), weight._rowwise_data.clone()

    def step(communicator: Any) -> None:
        weights.cast_master_weights_to_fp8(
            [weight], [master.reshape(-1)[100:600]], [100], communicator, [shard]
        )

    master[:, 10:] *= 0.5
    master[0, 150] = 40.0  # the amax, in the part of the only rank
    want = weight_of("current", master.to(torch.bfloat16))
    run_in_threads(step, 1)
    assert torch.equal(shard, want._rowwise_data.reshape(-1)[100:600])
    assert torch.equal(weight._rowwise_data, before)
    assert torch.equal(weight._rowwise_scale_inv, want._rowwise_scale_inv)


def test_no_rank_has_anything_of_an_empty_list() -> None:
    weights.quantize_master_weights([], [], [], None)
    weights.post_all_gather_processing([torch.ones(3)])


def test_parts_that_do_not_fit_are_refused_before_anything_is_written() -> None:
    good, plain = weight_of("current", torch.randn(160, 256)), torch.ones(160, 256)
    four = weight_of("nvfp4", torch.randn(160, 256))
    with fp8core.quantized_model_init(recipe=RECIPES["nvfp4"]):
        both = fp8core.Linear(256, 160, bias=False, params_dtype=torch.bfloat16).weight
    before, part = copy.deepcopy(good), torch.ones(100)
    shard = torch.zeros(3, dtype=torch.uint8)
    refused: dict[str, tuple[type[Exception], Any]] = {
        r"start_offsets has 1 entries, model_weights 2": (
            OperandError,
            ([good] * 2, [part] * 2, [0]),
        ),
        r"model_weights\[1\]: .* is no quantized": (
            OperandError,
            ([good, plain], [part] * 2, [0] * 2),
        ),
        r"\[1\] has 40960 elements": (OperandError, ([good] * 2, [part] * 2, [0, 40900])),
        r"start_offsets\[0\]=-1": (OperandError, ([good], [part], [-1])),
        r"start_offsets\[0\]=None": (OperandError, ([good], [part], [None])),
        r"start_offsets\[0\]=True": (OperandError, ([good], [part], [True])),
        r"expected floats": (OperandError, ([good], [part.int()], [0])),
        r"between two codes": (UnsupportedError, ([four], [part], [1])),
        r"whose scale covers more": (UnsupportedError, ([good[:64]], [part], [0])),
        r"holds columns": (UnsupportedError, ([both], [part], [0])),
        r"expected 100 contiguous elements of torch.uint8": (
            OperandError,
            ([good], [part], [0], None, [shard]),
        ),
    }
    strided = torch.zeros(100, 2, dtype=torch.uint8)[:, 0]
    for target in (strided, [0] * 100):
        with pytest.raises(OperandError, match="expected 100 contiguous elements"):
            weights.quantize_master_weights([good], [part], [0], None, [target])  # type: ignore[list-item]  # refused
    for pattern, (kind, (tensors, masters, offsets, *rest)) in refused.items():
        with pytest.raises(kind, match=pattern):
            weights.quantize_master_weights(tensors, masters, offsets, *(rest or [None]))
    for name in PARTS:
        if getattr(good, name) is not None:
            assert torch.equal(getattr(good, name), getattr(before, name))
    for buffer in (
        torch.zeros(3, dtype=torch.uint8),
        plain,
        None,
        torch.zeros(2, 40960).byte().t(),
    ):
        with pytest.raises(OperandError, match="new_raw_data"):
            weights.replace_raw_data(good, buffer)
    with pytest.raises(OperandError, match="no quantized tensor"):
        weights.replace_raw_data(plain, shard)
