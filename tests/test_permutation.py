"""Tokens sent to the rows of experts and back, beside torch's own indexing."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import fp8core
from fp8core.errors import OperandError
from fp8core.permutation import (
    moe_permute,
    moe_permute_and_pad_with_probs,
    moe_permute_with_probs,
    moe_sort_chunks_by_index,
    moe_sort_chunks_by_index_with_probs,
    moe_unpermute,
)
from fp8core.training import permutation
from tests.device import DEVICE, VALUES_ARE_READ
from tests.refusals import unrefused

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def routing(tokens: int = 7, experts: int = 4, topk: int = 2, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=generator)
    return torch.zeros(tokens, experts).scatter(1, scores.topk(topk, 1).indices, 1).bool()


def rand(*size: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_hand(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The tokens of expert 0, then those of expert 1, and so on."""
    return torch.cat([x[mask[:, expert].bool()] for expert in range(mask.shape[1])])


@pytest.mark.parametrize("dtype", DTYPES)
def test_mask_groups_tokens_by_expert(dtype: torch.dtype) -> None:
    x, mask = rand(7, 5, dtype=dtype), routing()
    output, _ = moe_permute(x, mask, 14)
    assert torch.equal(output, by_hand(x, mask))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.int32, torch.int64, torch.uint8])
def test_mask_of_any_integers(dtype: torch.dtype) -> None:
    x, mask = rand(7, 5), routing()
    assert torch.equal(moe_permute(x, mask.to(dtype), 14)[0], by_hand(x, mask))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_index_groups_tokens_by_expert(dtype: torch.dtype) -> None:
    x, index = rand(4, 5), torch.tensor([[2, 0], [1, 0], [2, 1], [0, 2]], dtype=dtype)
    output, row_id_map = moe_permute(x, index, 0, map_type="index")
    assert torch.equal(output, x[[0, 1, 3, 1, 2, 0, 2, 3]])
    # The first row of each token, then the second of each.
    assert row_id_map.tolist() == [5, 3, 6, 2, 0, 1, 4, 7]


def test_unpermute_adds_the_rows_of_each_token() -> None:
    x, mask = rand(7, 5), routing()
    output, row_id_map = moe_permute(x, mask, 14)
    torch.testing.assert_close(moe_unpermute(output, row_id_map), 2 * x)


def test_unpermute_weighs_the_rows_of_each_token() -> None:
    x, mask = rand(7, 5), routing()
    probs = torch.rand(7, 4) * mask
    output, row_id_map = moe_permute(x, mask, 14)
    y = moe_unpermute(output, row_id_map, merging_probs=probs, restore_shape=x.shape)
    torch.testing.assert_close(y, x * probs.sum(1, keepdim=True))


def test_unpermute_by_index_weighs_the_rows_of_each_token() -> None:
    x, index = rand(4, 5), torch.tensor([[2, 0], [1, 0], [2, 1], [0, 2]], dtype=torch.int32)
    probs = torch.rand(4, 2)
    output, row_id_map = moe_permute(x, index, 8, map_type="index")
    y = moe_unpermute(output, row_id_map, probs, map_type="index")
    torch.testing.assert_close(y, x * probs.sum(1, keepdim=True))


def test_unpermute_by_index_of_one_expert_needs_no_probs() -> None:
    x, index = rand(4, 5), torch.tensor([[2], [1], [2], [0]])
    output, row_id_map = moe_permute(x, index, 4, map_type="index")
    assert torch.equal(moe_unpermute(output, row_id_map, map_type="index"), x)


def test_tokens_without_a_row_are_dropped() -> None:
    x, mask = rand(7, 5), routing()
    output, row_id_map = moe_permute(x, mask, 9)
    assert torch.equal(output, by_hand(x, mask)[:9])
    assert int(row_id_map.max()) == 8
    y = moe_unpermute(output, row_id_map, restore_shape=x.shape)
    counts = (row_id_map >= 0).sum(1, keepdim=True)
    torch.testing.assert_close(y, x * counts)


def test_rows_without_a_token_are_zeros() -> None:
    x, mask = rand(7, 5), routing()
    output, _ = moe_permute(x, mask, 20)
    assert torch.equal(output[:14], by_hand(x, mask))
    assert not output[14:].any()


def test_index_that_is_negative_is_dropped() -> None:
    x, index = rand(3, 5), torch.tensor([[1, -1], [0, 1], [-1, -1]])
    output, row_id_map = moe_permute(x, index, 3, map_type="index")
    assert torch.equal(output, x[[1, 0, 1]])
    assert sorted(row_id_map.tolist()) == [-1, -1, -1, 0, 1, 2]


def test_probs_are_permuted_with_their_tokens() -> None:
    x, mask = rand(7, 5), routing()
    probs = torch.rand(7, 4)
    _, permuted, _ = moe_permute_with_probs(x, probs, mask, 14)
    assert torch.equal(permuted, torch.cat([probs[mask[:, e], e] for e in range(4)]))


def test_row_of_probability_0_is_zeros() -> None:
    x, mask = rand(7, 5), routing()
    probs = torch.rand(7, 4)
    probs[mask.nonzero()[0][0], mask.nonzero()[0][1]] = 0
    output, permuted, _ = moe_permute_with_probs(x, probs, mask, 14)
    assert not output[permuted == 0].any()
    assert (permuted == 0).sum() == 1


def test_padding_follows_the_rows_of_each_expert() -> None:
    x, mask = rand(7, 5), routing()
    probs, counts = torch.rand(7, 4), mask.sum(0)
    output, permuted, row_id_map, offsets, padded = moe_permute_and_pad_with_probs(
        x, probs, mask, counts, 8
    )
    assert padded.tolist() == [-(-n // 8) * 8 for n in counts.tolist()]
    parts = output.split(padded.tolist())
    for expert, part in enumerate(parts):
        count = int(counts[expert])
        assert torch.equal(part[:count], x[mask[:, expert]])
        assert not part[count:].any()
    assert not permuted[output.abs().sum(1) == 0].any()
    y = moe_unpermute(output, row_id_map, restore_shape=x.shape, pad_offsets=offsets)
    torch.testing.assert_close(y, 2 * x)


def test_no_padding_has_no_offsets() -> None:
    x, mask = rand(7, 5), routing()
    *_, offsets, padded = moe_permute_and_pad_with_probs(x, torch.rand(7, 4), mask, mask.sum(0), 1)
    assert offsets is None
    assert torch.equal(padded, mask.sum(0))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_chunks_are_sorted(dtype: torch.dtype) -> None:
    x, probs = rand(10, 3), torch.rand(10)
    sizes, order = torch.tensor([3, 0, 2, 5], dtype=dtype), torch.tensor([3, 1, 0, 2], dtype=dtype)
    parts, ends = x.split(sizes.tolist()), probs.split(sizes.tolist())
    expected = torch.cat([parts[at] for at in order.tolist()])
    assert torch.equal(moe_sort_chunks_by_index(x, sizes, order), expected)
    output, permuted = moe_sort_chunks_by_index_with_probs(x, probs, sizes, order)
    assert torch.equal(output, expected)
    assert torch.equal(permuted, torch.cat([ends[at] for at in order.tolist()]))


# Gradients


def every_function(x: torch.Tensor, probs: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    output, permuted, row_id_map = moe_permute_with_probs(x, probs, mask, 14)
    y = moe_unpermute(output * permuted[:, None], row_id_map, probs)
    plain, rows = moe_permute(y, mask, 12)
    chunks = moe_sort_chunks_by_index(plain, torch.tensor([5, 7]), torch.tensor([1, 0]))
    return [y, permuted, moe_unpermute(chunks, rows, restore_shape=x.shape)]


def test_gradients_of_both_orders() -> None:
    x, mask = rand(5, 3, dtype=torch.float64).requires_grad_(), routing(5, 4)
    probs = (torch.rand(5, 4, dtype=torch.float64) + 0.1).requires_grad_()

    def run(x: torch.Tensor, probs: torch.Tensor) -> Any:
        output, permuted, row_id_map = moe_permute_with_probs(x, probs, mask, 10)
        return moe_unpermute(output * permuted[:, None], row_id_map, probs)

    assert torch.autograd.gradcheck(run, (x, probs))
    assert torch.autograd.gradgradcheck(run, (x, probs))


@pytest.mark.parametrize("rows", [9, 14, 20])
@pytest.mark.parametrize("weighs", [False, True])
def test_gradients_do_not_depend_on_what_is_remembered_of_a_map(rows: int, weighs: bool) -> None:
    x, mask = rand(7, 5), routing()
    probs = torch.rand(7, 4) if weighs else None
    output, row_id_map = moe_permute(x, mask, rows)
    grads = []
    for one in (row_id_map, row_id_map.clone()):
        leaf = output.clone().requires_grad_()
        moe_unpermute(leaf, one, probs).backward(rand(7, 5, seed=3))
        grads.append(leaf.grad)
    assert torch.equal(*grads)


def test_backward_does_not_invert_a_map_that_was_made_by_a_mask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    output, row_id_map = moe_permute(rand(7, 5), routing(), 14)
    kinds: list[str] = []
    route = permutation.route
    monkeypatch.setattr(
        permutation, "route", lambda kind, *rest: [kinds.append(kind), route(kind, *rest)][1]
    )
    moe_unpermute(output.requires_grad_(), row_id_map).sum().backward()
    assert kinds == []


def test_a_map_that_was_written_is_inverted_again() -> None:
    x, mask = rand(7, 5), routing()
    output, row_id_map = moe_permute(x, mask, 14)
    row_id_map[3] = -1
    leaf = output.clone().requires_grad_()
    moe_unpermute(leaf, row_id_map).sum().backward()
    assert leaf.grad is not None
    assert int(leaf.grad.any(1).sum()) == 12


def test_gradients_of_sorted_chunks_with_probs() -> None:
    x, probs = rand(10, 3).requires_grad_(), torch.rand(10).requires_grad_()
    sizes, order = [3, 0, 2, 5], [3, 1, 0, 2]
    weights, of_probs = rand(10, 3, seed=5), rand(10, seed=6)

    def gradients(rows: torch.Tensor, permuted: torch.Tensor) -> Any:
        total = (rows * weights).sum() + (permuted * of_probs).sum()
        return torch.autograd.grad(total, (x, probs))

    results = moe_sort_chunks_by_index_with_probs(
        x, probs, torch.tensor(sizes), torch.tensor(order)
    )
    parts, ends = x.split(sizes), probs.split(sizes)
    expected = (torch.cat([parts[at] for at in order]), torch.cat([ends[at] for at in order]))
    assert all(map(torch.equal, gradients(*results), gradients(*expected)))


def test_gradient_of_dropped_tokens_is_0() -> None:
    x, mask = rand(7, 5).requires_grad_(), routing()
    output, row_id_map = moe_permute(x, mask, 9)
    output.sum().backward()
    assert torch.equal(x.grad, (row_id_map >= 0).sum(1, keepdim=True).expand(7, 5).float())


def test_gradients_are_those_of_torch_func() -> None:
    x, mask, probs = rand(7, 5), routing(), torch.rand(7, 4) + 0.1

    def loss(x: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        return sum((one * one).sum() for one in every_function(x, probs, mask))

    leaves = [x.clone().requires_grad_(), probs.clone().requires_grad_()]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    found = torch.func.grad(loss, argnums=(0, 1))(x, probs)
    torch.testing.assert_close(found, expected)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_compiled_in_one_graph() -> None:
    x, mask, probs = rand(7, 5), routing(), torch.rand(7, 4) + 0.1
    leaves = [x.clone().requires_grad_(), probs.clone().requires_grad_()]
    expected = every_function(*leaves, mask)
    sum(one.square().sum() for one in expected).backward()
    want = [leaf.grad for leaf in leaves]
    again = [x.clone().requires_grad_(), probs.clone().requires_grad_()]
    results = torch.compile(every_function, fullgraph=True, backend="aot_eager")(*again, mask)
    sum(one.square().sum() for one in results).backward()
    torch.testing.assert_close(results, expected)
    torch.testing.assert_close([leaf.grad for leaf in again], want)


# Hostile input


@pytest.mark.parametrize("map_type", ["mask", "index"])
def test_no_tokens(map_type: str) -> None:
    x = torch.empty(0, 5, requires_grad=True)
    output, row_id_map = moe_permute(x, torch.empty(0, 4, dtype=torch.int32), 0, map_type=map_type)
    y = moe_unpermute(output, row_id_map, map_type=map_type)
    assert output.shape == y.shape == (0, 5)
    y.sum().backward()
    assert x.grad is not None


def test_no_columns_and_no_experts() -> None:
    assert moe_permute(torch.empty(4, 0), torch.ones(4, 2, dtype=torch.bool), 8)[0].shape == (8, 0)
    output, rows = moe_permute(rand(4, 3), torch.empty(4, 0, dtype=torch.bool), 2)
    assert not output.any()
    assert not moe_unpermute(output, rows).any()


def test_strides_do_not_matter() -> None:
    x, mask = rand(5, 7).t(), routing().t().contiguous().t()
    output, rows = moe_permute(x, mask, 14)
    assert torch.equal(output, by_hand(x.contiguous(), mask))
    spread = rand(14, 10)[:, ::2]
    expected = moe_unpermute(spread.contiguous(), rows)
    assert torch.equal(moe_unpermute(spread, rows.t().contiguous().t()), expected)


ERRORS: dict[str, Any] = {
    "expected floating-point [rows, hidden]": lambda: moe_permute(
        torch.ones(3, 4, dtype=torch.int32), routing(3), 6
    ),
    "a row of routing_map for each token": lambda: moe_permute(rand(3, 4), routing(4), 6),
    "expected a tensor of integers": lambda: moe_permute(rand(3, 4), torch.rand(3, 4), 6),
    "expected an integer of 0 or above": lambda: moe_permute(rand(3, 4), routing(3), -1),
    "num_out_tokens=None)": lambda: moe_permute(rand(3, 4), routing(3), None),
    "num_out_tokens=6.5)": lambda: moe_permute(rand(3, 4), routing(3), 6.5),
    "probs is [7]": lambda: moe_sort_chunks_by_index_with_probs(
        rand(0, 4), torch.rand(7), torch.zeros(1, dtype=torch.int64), torch.tensor([0])
    ),
    "expected one of 'mask', 'index'. Did you mean 'mask'?": lambda: moe_permute(
        rand(3, 4), routing(3), 6, map_type="masks"
    ),
    "row_id_map has row 5, and inp 4 rows": lambda: moe_unpermute(
        rand(4, 3), torch.tensor([[0, 5]], dtype=torch.int32)
    ),
    "restore_shape=[3, 5]": lambda: moe_unpermute(
        rand(4, 5), torch.zeros(2, 2, dtype=torch.int32), restore_shape=(3, 5)
    ),
    "merging_probs is [2, 3]": lambda: moe_unpermute(
        rand(4, 5), torch.zeros(2, 2, dtype=torch.int32), torch.rand(2, 3)
    ),
    "set map_type='index'": lambda: moe_unpermute(rand(4, 5), torch.zeros(4, dtype=torch.int32)),
    "add up to 12; expected sizes of 0 and above that add up to the 10": lambda: (
        moe_sort_chunks_by_index(rand(10, 3), torch.tensor([5, 7]), torch.tensor([1, 0]))
    ),
    "the numbers 0 to 1, each once": lambda: moe_sort_chunks_by_index(
        rand(10, 3), torch.tensor([5, 5]), torch.tensor([1, 1])
    ),
    "routing_map sends [3, 3] tokens": lambda: moe_permute_and_pad_with_probs(
        rand(3, 4), torch.rand(3, 2), torch.ones(3, 2, dtype=torch.bool), torch.tensor([1, 3]), 4
    ),
    "split_sizes is list": lambda: moe_sort_chunks_by_index(rand(3, 4), [1, 2], [1, 0]),
    "split_sizes is [1, 2]": lambda: moe_sort_chunks_by_index(
        rand(3, 4), torch.tensor([[1, 2]]), torch.tensor([[1, 0]])
    ),
    "align_size=0": lambda: moe_permute_and_pad_with_probs(
        rand(3, 4), torch.rand(3, 4), routing(3), torch.ones(4, dtype=torch.int32), 0
    ),
}


OF_VALUES = {
    "row_id_map has row 5, and inp 4 rows",
    "add up to 12; expected sizes of 0 and above that add up to the 10",
    "the numbers 0 to 1, each once",
    "routing_map sends [3, 3] tokens",
}


def assert_named(names: Iterable[str]) -> None:
    table = {words: (ERRORS[words], OperandError, re.escape(words)) for words in names}
    assert unrefused(table) == {}


def test_what_does_not_fit_is_named() -> None:
    assert_named(ERRORS.keys() - OF_VALUES)


@VALUES_ARE_READ
def test_values_that_do_not_fit_are_named() -> None:
    assert_named(OF_VALUES)


def test_former_name_of_merging_probs_warns() -> None:
    output, rows = moe_permute(rand(3, 4), routing(3), 6)
    probs = torch.rand(3, 4)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        y = moe_unpermute(output, rows, probs=probs)
    assert [one.category for one in found] == [DeprecationWarning]
    assert torch.equal(y, moe_unpermute(output, rows, probs))


def test_no_tokens_come_back_from_an_index_with_weights() -> None:
    output, rows = moe_permute(
        rand(0, 4), torch.zeros(0, 2, dtype=torch.int32), 0, map_type="index"
    )
    y = moe_unpermute(output, rows, torch.rand(0, 2), map_type="index")
    assert y.shape == (0, 4)


QUANTIZERS = {
    "current": fp8core.Float8CurrentScalingQuantizer(fp8core.DType.kFloat8E4M3, device=DEVICE),
    "mxfp8": fp8core.MXFP8Quantizer(fp8core.DType.kFloat8E4M3),
    "block": fp8core.Float8BlockQuantizer(
        fp8core.DType.kFloat8E4M3, rowwise=True, columnwise=False, block_scaling_dim=1
    ),
}


@pytest.mark.parametrize("map_type", ["mask", "index"])
@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_quantized_tensor_is_permuted_in_its_codes(name: str, map_type: str) -> None:
    """Rows without a token are zeros, and take no gradient."""
    quantizer = QUANTIZERS[name]
    quantizer.set_usage(rowwise=True, columnwise=name == "current")
    x = torch.randn(6, 256).bfloat16().requires_grad_()
    quantized = quantizer(x)
    mask = torch.tensor([[1, 0, 1], [0, 1, 0], [1, 1, 0], [0, 0, 1], [1, 0, 0], [0, 1, 0]])
    experts = torch.tensor([[0, 2], [1, -1], [0, 1], [2, -1], [0, -1], [-1, 1]])
    chosen = (mask if map_type == "mask" else experts).int()
    rows, row_id_map = moe_permute(quantized, chosen, 10, map_type=map_type)
    want, same_map = moe_permute(quantized.dequantize(), chosen, 10, map_type=map_type)
    assert isinstance(rows, fp8core.QuantizedTensor)
    assert torch.equal(rows.dequantize(), want)
    assert torch.equal(row_id_map, same_map)
    weights = torch.randn(10, 256).bfloat16()
    (grad,) = torch.autograd.grad((rows.dequantize() * weights).sum(), x, retain_graph=True)
    (expected,) = torch.autograd.grad((want * weights).sum(), x)
    torch.testing.assert_close(grad, expected, rtol=2**-7, atol=2**-6)  # sums of two in bfloat16
    back = moe_unpermute(rows.dequantize(), row_id_map, map_type=map_type)
    assert torch.equal(back, moe_unpermute(want, row_id_map, map_type=map_type))


CHUNKS = torch.tensor([20, 0, 12]), torch.tensor([2, 0, 1])
PERMUTING: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "moe_permute": lambda x, mask, probs: moe_permute(x, mask, 60)[:1],
    "moe_permute_with_probs": lambda x, mask, probs: moe_permute_with_probs(x, probs, mask, 60)[:2],
    "moe_permute_and_pad_with_probs": lambda x, mask, probs: moe_permute_and_pad_with_probs(
        x, probs, mask, mask.sum(0), 16
    )[:2],
    "moe_sort_chunks_by_index": lambda x, mask, probs: (
        moe_sort_chunks_by_index(x, *(part.to(x.device) for part in CHUNKS)),
    ),
    "moe_sort_chunks_by_index_with_probs": lambda x, mask, probs: (
        moe_sort_chunks_by_index_with_probs(x, probs[:, 0], *(part.to(x.device) for part in CHUNKS))
    ),
}


COLUMNS = {"cast": fp8core.MXFP8Quantizer("e4m3"), "high": fp8core.IdentityQuantizer()}


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("name", PERMUTING)
def test_rows_are_permuted_in_codes_beside_columns(name: str, columns: str) -> None:
    """The result has the rows alone: its columns would be other codes."""
    quantizer = fp8core.HybridQuantizer(
        rowwise_quantizer=fp8core.MXFP8Quantizer("e4m3"), columnwise_quantizer=COLUMNS[columns]
    )
    x = torch.randn(32, 64, requires_grad=True)
    quantized = quantizer(x)
    mask = torch.randint(2, (32, 4), dtype=torch.int32)
    probs = torch.rand(32, 4) * mask
    probs[3] = 0  # whose rows the functions with probabilities leave out
    rows, *permuted = PERMUTING[name](quantized, mask, probs)
    want, *expected = PERMUTING[name](quantized.dequantize(), mask, probs)
    assert isinstance(rows, fp8core.QuantizedTensor)
    assert rows.get_usages() == {"rowwise": True, "columnwise": False}
    assert torch.equal(rows.dequantize(), want)
    assert all(map(torch.equal, permuted, expected))
    weights = torch.randn(rows.shape)
    (grad,) = torch.autograd.grad((rows.dequantize() * weights).sum(), x, retain_graph=True)
    (of_values,) = torch.autograd.grad((want * weights).sum(), x)
    assert torch.equal(grad, of_values)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # torch's own
@pytest.mark.parametrize("place", ["before", "within"])
@pytest.mark.parametrize("name", [each for each in PERMUTING if "pad" not in each])
def test_codes_are_permuted_in_one_graph(name: str, place: str) -> None:
    """The padded rows are counted on the host."""
    quantizer = fp8core.MXFP8Quantizer("e4m3")
    mask, probs = torch.randint(2, (32, 4), dtype=torch.int32), torch.rand(32, 4)

    def permuted(x: torch.Tensor) -> torch.Tensor:
        rows = PERMUTING[name](quantizer(x) if place == "within" else x, mask, probs)[0]
        assert isinstance(rows, fp8core.QuantizedTensor)
        return rows.dequantize()

    x = torch.randn(32, 64, requires_grad=True)
    given = x if place == "within" else quantizer(x)
    expected = permuted(given)
    (want,) = torch.autograd.grad(expected.square().sum(), x, retain_graph=True)
    y = torch.compile(permuted, fullgraph=True, backend="aot_eager")(given)
    assert torch.equal(y, expected)
    assert torch.equal(torch.autograd.grad(y.square().sum(), x)[0], want)


def test_codes_of_no_experts_are_no_rows() -> None:
    x = fp8core.MXFP8Quantizer("e4m3")(torch.randn(32, 64))
    mask = torch.empty(32, 0, dtype=torch.int32)
    assert torch.equal(moe_permute(x, mask, 5)[0], torch.zeros(5, 64))
    rows, probs, _ = moe_permute_with_probs(x, torch.empty(32, 0), mask, 5)
    assert not rows.any()
    assert torch.equal(probs, torch.zeros(5))


def test_a_quantized_tensor_whose_rows_cannot_be_selected_is_permuted_by_its_values() -> None:
    quantizer = fp8core.MXFP8Quantizer(fp8core.DType.kFloat8E4M3, with_2d_quantization=True)
    quantized = quantizer(torch.randn(32, 64).bfloat16())
    mask = torch.randint(2, (32, 4), dtype=torch.int32)
    rows, _ = moe_permute(quantized, mask, 50)
    assert torch.equal(rows, moe_permute(quantized.dequantize(), mask, 50)[0])
