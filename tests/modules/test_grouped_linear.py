"""GroupedLinear: ragged and empty groups, what m_splits may be, given memory, and padding."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

import fp8core
from fp8core import (
    GroupedLinear,
    Linear,
    OperandError,
    QuantizedTensor,
    UnsupportedError,
    autocast,
    monitor,
    ops,
    quantized_model_init,
    recipe,
)
from fp8core.modules.layers import grouped_linear
from fp8core.modules.layers.grouped_linear import Fp8Padding, Fp8Unpadding
from fp8core.torch_ops.private import PASSES_DATACLASSES
from tests.device import DEVICE, assert_same_sums
from tests.modules.layers import RECIPES, active, assert_same, step
from tests.pairs import pairs, turns
from tests.refusals import Refusal, unrefused

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work

SPLITS = [5, 0, 3]
DETERMINISTIC = [name for name in RECIPES if name != "nvfp4"]


def test_a_rank_has_its_share_of_the_features() -> None:
    for mode, shape in [("column", (4, 8)), ("row", (8, 4))]:
        layer = GroupedLinear(2, 8, 8, tp_size=2, parallel_mode=mode, bias=False)
        assert tuple(layer.weight0.shape) == tuple(layer.weight1.shape) == shape, (mode, shape)
        assert layer.weight0.partition_dim == (mode == "row"), (mode, shape)
        k = shape[1]
        assert layer(torch.ones(3, k), [1, 2]).shape == (3, shape[0]), (mode, shape)


@pytest.mark.usefixtures("first_algorithms")
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_each_group_has_the_bits_of_a_linear_of_its_own(name: str) -> None:
    layer = GroupedLinear(3, 32, 16)
    for group in range(3):
        torch.nn.init.normal_(getattr(layer, f"bias{group}"))
    x, dy = torch.randn(8, 32, requires_grad=True), torch.randn(8, 16)
    with active(name):
        y = layer(x, SPLITS)
    y.backward(dy)
    rows = [part.split(SPLITS) for part in (x.detach(), dy, y, x.grad)]
    for group, (x_g, dy_g, y_g, dx_g) in enumerate(zip(*rows, strict=True)):
        alone, leaf = Linear(32, 16), x_g.clone().requires_grad_()
        own = {kind: getattr(layer, f"{kind}{group}") for kind in ("weight", "bias")}
        alone.load_state_dict(own)
        with active(name):
            wanted = alone(leaf)
        wanted.backward(dy_g)
        got = (y_g, dx_g, own["weight"].grad, own["bias"].grad)
        want = (wanted, leaf.grad, alone.weight.grad, alone.bias.grad)
        for mine, its in zip(got, want, strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=1e-6 if name == "none" else 0)
        if not len(x_g):
            assert not own["weight"].grad.any()
            assert not own["bias"].grad.any()


@pytest.mark.usefixtures("first_algorithms")
def test_m_splits_may_be_a_list_a_tuple_or_a_tensor() -> None:
    for name in RECIPES:
        layer, x = GroupedLinear(3, 32, 16), torch.randn(8, 32)
        want = step(layer, x, name, SPLITS)[:1]
        for splits in (tuple(SPLITS), torch.tensor(SPLITS), torch.tensor(SPLITS).int()):
            layer.reset_delayed_state()
            got = step(layer, x, name, splits)[:1]
            assert_same_sums(got, want, in_fp8=name != "none")


def test_m_splits_may_be_whatever_counts_as_an_integer() -> None:
    layer, x = GroupedLinear(3, 32, 16), torch.randn(8, 32)
    integers = [np.int64(size) for size in SPLITS]
    for splits in [np.array(SPLITS), integers, list(torch.tensor(SPLITS))]:
        assert torch.equal(layer(x, splits), layer(x, SPLITS)), splits


def test_groups_may_change_from_call_to_call() -> None:
    for name in RECIPES:
        layer = GroupedLinear(3, 32, 16)
        for splits in ([1, 2, 3], [0, 0, 7], [4, 0, 0]):
            y, *_ = step(layer, torch.randn(sum(splits), 32), name, splits)
            assert y.shape == (sum(splits), 16), name


TWO_AND_SEVEN = torch.cat([torch.full((5, 32), 2.0), torch.full((3, 32), 7.0)])


@pytest.mark.parametrize("calibrates", [False, True])
def test_each_group_has_slots_of_its_own(calibrates: bool) -> None:
    layer = GroupedLinear(3, 32, 16)
    with autocast(enabled=not calibrates, calibrating=calibrates, recipe=RECIPES["delayed"]):
        y = layer(TWO_AND_SEVEN, SPLITS)
    assert layer.scale_fwd.shape == (9,)
    assert layer.amax_history_fwd[-1, 0::3].tolist() == [2.0, 0.0, 7.0]
    if calibrates:
        weights = [getattr(layer, f"weight{group}").abs().max().item() for group in range(3)]
        assert layer.amax_history_fwd[-1, 1::3].tolist() == weights
    else:
        y.sum().backward()
        assert layer.amax_history_bwd[-1, 0::2].tolist() == [1.0, 0.0, 1.0]


def test_an_empty_group_keeps_the_scale_of_its_input() -> None:
    layer = GroupedLinear(2, 32, 16)
    step(layer, torch.full((4, 32), 7.0), "delayed", [2, 2])
    before = layer.scale_fwd[3].item()
    step(layer, torch.full((4, 32), 1.0), "delayed", [4, 0])
    assert layer.scale_fwd[3].item() == before == 64.0


# --- results in memory that the caller gives ---


@pytest.mark.parametrize(
    ("chosen", "splits", "sizes"),
    pairs([None, "current", "mxfp8", "nvfp4"], [[7, 0, 33], [0, 0, 40]], [(64, 32), (50, 31)]),
    ids=str,
)
def test_results_are_written_there(chosen: Any, splits: Any, sizes: tuple[int, int]) -> None:
    layer, x = GroupedLinear(3, *sizes), torch.randn(40, sizes[0])
    want = step(layer, x, chosen, splits)
    out, dgrad_out = torch.full((40, sizes[1]), 9.0), torch.full((40, sizes[0]), 9.0)
    got = step(layer, x, chosen, splits, out=out, dgrad_out=dgrad_out)
    assert_same(got, want)
    assert_same([out, dgrad_out], want[:2])
    assert got[0].data_ptr() == out.data_ptr()  # type: ignore[union-attr]  # a tensor


def test_a_buffer_stays_without_history_and_can_be_given_again() -> None:
    layer, x = GroupedLinear(2, 32, 32), torch.randn(8, 4, 32)
    out = torch.empty(8, 4, 32)
    for _ in range(2):
        y = layer(x, [16, 16], out=out)
        assert isinstance(y, torch.Tensor)
        assert y.shape == out.shape
        assert y.requires_grad
        assert not out.requires_grad


BAD = {
    "shape": torch.empty(8, 31),
    "dtype": torch.empty(8, 32, dtype=torch.bfloat16),
    "strides": torch.empty(32, 8).t(),
    "a gradient": torch.empty(8, 32, requires_grad=True),
    "device": torch.empty(8, 32, device="meta"),
}


def test_a_buffer_that_does_not_fit_is_refused() -> None:
    for bad, name in turns(BAD, ["out", "dgrad_out"]):
        layer = GroupedLinear(2, 32, 32)
        with pytest.raises(
            OperandError, match=rf"{name} is torch\..*expected torch.float32 \[8, 32\]"
        ):
            layer(torch.randn(8, 32), [4, 4], **{name: BAD[bad]})


@pytest.mark.skipif(not PASSES_DATACLASSES, reason="an older torch raises before it is asked")
def test_a_graph_refuses_a_buffer() -> None:
    layer, out = GroupedLinear(2, 32, 32), torch.empty(8, 32)
    compiled = torch.compile(lambda x: layer(x, [4, 4], out=out), backend="eager")
    with pytest.raises(UnsupportedError, match=r"not offered under torch\.compile"):
        compiled(torch.randn(8, 32))


# --- sizes that stay on the device, here played by the CPU ---

WITHOUT_PADDING = ["delayed", "current", "block", "rowwise"]
SIZES = ([5, 0, 3], [0, 0, 8], [1, 1, 6], [130, 0, 70])
on_device = pytest.mark.usefixtures("device_sizes")


@pytest.fixture
def device_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped_linear, "stays_on_device", lambda sizes: True)


@on_device
@pytest.mark.usefixtures("first_algorithms")
@pytest.mark.parametrize(("sizes", "name"), turns(SIZES, ["none", *WITHOUT_PADDING]), ids=str)
def test_sizes_on_the_device_give_what_a_list_gives(sizes: list[int], name: str) -> None:
    layer, x = GroupedLinear(3, 144, 32), torch.randn(sum(sizes), 144)
    want = step(layer, x, name, sizes)
    layer.reset_delayed_state()
    got = step(layer, x, name, torch.tensor(sizes))
    for mine, its in zip(got, want, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-6, atol=1e-5)


@on_device
@pytest.mark.usefixtures("first_algorithms")
@pytest.mark.parametrize("chosen", ["rowwise", "block", "current"])
def test_stored_weights_alone_take_sizes_on_the_device(chosen: str) -> None:
    layer = GroupedLinear(3, 144, 32, params_dtype=torch.bfloat16).eval()
    fp8core.quantize_(layer, recipe.WeightOnly(chosen))
    assert all(isinstance(getattr(layer, f"weight{group}"), QuantizedTensor) for group in range(3))
    for sizes in SIZES:
        x = torch.randn(sum(sizes) + 3, 144).bfloat16()
        inputs = [part.clone().requires_grad_() for part in (x, x[:-3])]
        got = layer(inputs[0], torch.tensor(sizes))
        want = layer(inputs[1], sizes)
        (got * 2.0).sum().backward()
        (want * 2.0).sum().backward()
        torch.testing.assert_close(got[:-3], want, rtol=2.0**-6, atol=2.0**-6)
        torch.testing.assert_close(inputs[0].grad[:-3], inputs[1].grad, rtol=2.0**-6, atol=2.0**-6)
        assert not got[-3:].any()
        assert not inputs[0].grad[-3:].any()


@on_device
@pytest.mark.parametrize("name", WITHOUT_PADDING)
def test_rows_beyond_the_groups_are_zeros_and_change_nothing(name: str) -> None:
    layer, x = GroupedLinear(3, 144, 32), torch.randn(12, 144)
    x[8:] = float("nan")
    y, dx, *_ = step(layer, x, name, torch.tensor(SPLITS))
    layer.reset_delayed_state()
    want, *_ = step(layer, x[:8], name, torch.tensor(SPLITS))
    assert not y[8:].any()
    assert not dx[8:].any()
    assert torch.equal(y[:8], want)


@on_device
def test_sizes_that_do_not_fit_are_cut_off() -> None:
    for sizes in [[5, 0, 4], [100, 100, 100], [-3, 5, 3], [2**62, 2**62, 2**62]]:
        layer, x = GroupedLinear(3, 144, 32), torch.randn(8, 144)
        ends = torch.tensor(sizes).clamp(0, 8).cumsum(0).clamp(max=8)
        cut = ends.diff(prepend=torch.zeros(1, dtype=torch.int64))
        assert_same(step(layer, x, "block", torch.tensor(sizes)), step(layer, x, "block", cut))


@on_device
def test_no_row_at_all_gives_zero_gradients() -> None:
    layer = GroupedLinear(3, 144, 32)
    y, _, *grads = step(layer, torch.randn(0, 144), "block", torch.tensor([0, 0, 0]))
    assert y.shape == (0, 32)
    assert not any(grad.any() for grad in grads)


@on_device
@pytest.mark.parametrize("name", WITHOUT_PADDING)
def test_gradients_are_added_to_main_grad(name: str) -> None:
    layer, x = GroupedLinear(3, 144, 32, fuse_wgrad_accumulation=True), torch.randn(8, 144)
    plain = GroupedLinear(3, 144, 32)
    plain.load_state_dict(layer.state_dict())
    for weight in layer.parameters():
        weight.main_grad = torch.ones_like(weight)
    for one in (layer, plain):
        step(one, x, name, torch.tensor(SPLITS))
    for group in range(3):
        found = getattr(layer, f"weight{group}").main_grad
        grad = getattr(plain, f"weight{group}").grad
        torch.testing.assert_close(found, grad + 1, rtol=1e-6, atol=1e-5)


def sized(sizes: torch.Tensor, name: str = "none", dtype: torch.dtype = torch.float32) -> Any:
    layer, x = GroupedLinear(3, 32, 32, params_dtype=dtype), torch.randn(8, 32).to(dtype)
    with active(name):
        return layer(x, sizes)


def monitored(sizes: torch.Tensor) -> Any:
    layer = GroupedLinear(3, 32, 16)
    with monitor(layer):
        return layer(torch.randn(8, 32), sizes)


@on_device
def test_sizes_on_the_device_that_cannot_be_taken_are_refused() -> None:
    no_sizes = r"expected an integer tensor \[3\]"
    sizes = torch.tensor(SPLITS)
    table: dict[str, Refusal] = {
        "two": (lambda: sized(torch.tensor([5, 3])), OperandError, no_sizes),
        "floats": (lambda: sized(torch.tensor([5.0, 0.0, 3.0])), OperandError, no_sizes),
        "booleans": (lambda: sized(torch.tensor([True, False, True])), OperandError, no_sizes),
        "another device": (
            lambda: sized(torch.empty(3, dtype=torch.int64, device="meta")),
            *(OperandError, f"m_splits is on meta, the input on {DEVICE}"),
        ),
        "rows to pad": (
            lambda: sized(sizes, "mxfp8", torch.bfloat16),
            *(UnsupportedError, "only the device knows cannot be padded"),
        ),
        "a monitor": (
            lambda: monitored(sizes),
            *(UnsupportedError, "a monitor has to read m_splits"),
        ),
    }
    assert unrefused(table) == {}


# --- zero rows behind the tokens of each expert, and their removal ---


def test_each_group_is_padded_with_zeros_and_unpadded() -> None:
    x = torch.randn(10, 3)
    padded, sizes = Fp8Padding(3, 4)(x, [3, 0, 7])
    assert sizes == [4, 0, 8]
    assert torch.equal(padded[:3], x[:3])
    assert torch.equal(padded[4:11], x[3:])
    assert not padded[[3, 11]].any()
    assert torch.equal(Fp8Unpadding(3, 4)(padded, [3, 0, 7]), x)
    padded, sizes = Fp8Padding(2, 4)(torch.empty(0, 3), [0, 0])
    assert (padded.shape, sizes) == ((0, 3), [0, 0])


def test_rows_that_need_no_padding_are_returned() -> None:
    x, splits = torch.randn(12, 3), [4, 8]
    padded, sizes = Fp8Padding(2, 4)(x, splits)
    assert padded is x
    assert sizes is splits
    assert Fp8Unpadding(2, 4)(x, splits) is x


@pytest.mark.parametrize("layer", [Fp8Padding, Fp8Unpadding])
def test_gradients_of_padding(layer: Any) -> None:
    rows = 10 if layer is Fp8Padding else 12
    x = torch.randn(rows, 3, dtype=torch.float64, requires_grad=True)

    def run(x: torch.Tensor) -> torch.Tensor:
        y = layer(3, 4)(x, [3, 0, 7])
        return y[0] if isinstance(y, tuple) else y

    assert torch.autograd.gradcheck(run, (x,))


def test_multiple_is_what_the_recipe_needs() -> None:
    for name, size in {
        **dict.fromkeys(("delayed", "current", "block"), 16),
        **{"mxfp8": 32, "nvfp4": 128},
    }.items():
        layer = Fp8Padding(1)
        with active(name):
            layer(torch.randn(3, 5), [3])
        assert layer.align_size == size, name


X = torch.zeros(3, 5)
PADDED: dict[str, Any] = {
    "expected 2 numbers": lambda: Fp8Padding(2, 4)(X, [3]),
    "m_splits [-1, 4]": lambda: Fp8Padding(2, 4)(X, [-1, 4]),
    "has 3 rows; expected 7": lambda: Fp8Padding(2, 4)(X, [3, 4]),
    "expected 8, those of the groups [4, 4]": lambda: Fp8Unpadding(2, 4)(X, [3, 4]),
    "align_size=0": lambda: Fp8Padding(2, 0),
}


def test_what_cannot_be_padded_is_named() -> None:
    table = {words: (call, OperandError, re.escape(words)) for words, call in PADDED.items()}
    assert unrefused(table) == {}


def single_pair(kinds: Sequence[str], **arguments: Any) -> tuple[GroupedLinear, GroupedLinear]:
    """Return a layer with a parameter for each group, and an equal one that has one of all."""
    layers = []
    for options in ({}, {f"single_grouped_{kind}": True for kind in kinds}):
        torch.manual_seed(0)
        layers.append(GroupedLinear(3, 32, 16, **arguments, **options))
    return layers[0], layers[1]


SINGLE = [("weight",), ("bias",), ("weight", "bias")]


@pytest.mark.usefixtures("first_algorithms")
@pytest.mark.parametrize("kinds", SINGLE)
def test_a_parameter_of_all_groups_starts_as_those_of_each_and_loads_both_ways(
    kinds: tuple[str, ...],
) -> None:
    groups, single = single_pair(kinds)
    own = groups.state_dict()
    want = {"weight": (3, 16, 32), "bias": (3, 16)}
    assert {k: tuple(v.shape) for k, v in single.named_parameters() if k in want} == {
        kind: want[kind] for kind in kinds
    }
    for kind in kinds:
        stacked = torch.stack([own[f"{kind}{group}"] for group in range(3)])
        assert torch.equal(single.state_dict()[kind], stacked)
    for target, source in ((single, groups), (groups, single)):
        with torch.no_grad():
            for parameter in source.parameters():
                parameter.normal_()
        before = {key: value.clone() for key, value in source.state_dict().items()}
        target.load_state_dict(source.state_dict())
        for key, value in source.state_dict().items():
            assert torch.equal(value, before[key])
        x = torch.randn(8, 32)
        assert torch.equal(target(x, SPLITS), source(x, SPLITS))
    before = {key: value.clone() for key, value in single.state_dict().items()}
    first = f"{kinds[0]}0"
    missing = {key: value for key, value in own.items() if key != first}
    for wrong in (missing, {**own, first: own[first][:3]}, {**own, first: torch.tensor(1.0)}):
        with pytest.raises(RuntimeError, match=f"Missing key.*{kinds[0]}"):
            single.load_state_dict(wrong)
    for value in (torch.tensor(1.0), torch.zeros(4, 16), 5):
        rest = {key: saved for key, saved in own.items() if kinds[0] not in key}
        with pytest.raises(RuntimeError, match=f"Missing key.*{kinds[0]}0"):
            groups.load_state_dict({**rest, kinds[0]: value})
    for key, value in single.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.usefixtures("first_algorithms")
@pytest.mark.parametrize("name", DETERMINISTIC)
def test_a_parameter_of_all_groups_trains_as_those_of_each(name: str) -> None:
    """Results, gradients and steps of an optimizer, bit for bit; in calls alike, too."""
    groups, single = single_pair(("weight", "bias"))
    optimizers = [fp8core.optimizers.FusedAdam(x.parameters(), lr=0.1) for x in (groups, single)]
    for first in (None, True, False):
        x, dy = torch.randn(8, 32), torch.randn(8, 16)
        results = []
        for layer, optimizer in zip((groups, single), optimizers, strict=True):
            leaf = x.clone().requires_grad_()
            optimizer.zero_grad()
            with active(name):
                y = layer(leaf, SPLITS, first)
            y.backward(dy)
            results.append([y, leaf.grad])
        for kind in ("weight", "bias"):
            parts = [getattr(groups, f"{kind}{group}").grad for group in range(3)]
            results[0].append(torch.stack(parts))
            results[1].append(getattr(single, kind).grad)
        for mine, its in zip(*results, strict=True):
            assert torch.equal(mine, its)
        if first is not True:  # the next microbatch computes with the weights of the first
            for optimizer in optimizers:
                optimizer.step()
    for kind in ("weight", "bias"):
        stacked = torch.stack([getattr(groups, f"{kind}{group}") for group in range(3)])
        assert torch.equal(getattr(single, kind), stacked)


@pytest.mark.usefixtures("first_algorithms")
def test_a_parameter_of_all_groups_is_copied_compiled_and_moved() -> None:
    _, single = single_pair(("weight", "bias"), return_bias=True)
    x = torch.randn(8, 32)
    want, biases = single(x, SPLITS)
    assert [tuple(bias.shape) for bias in biases] == [(16,)] * 3
    compiled = torch.compile(single, backend="eager")
    for layer in (copy.deepcopy(single), pickle.loads(pickle.dumps(single)), compiled):
        assert torch.equal(layer(x, SPLITS)[0], want)
    assert single.bfloat16().weight.dtype == torch.bfloat16
    single(x.bfloat16(), SPLITS)[0].sum().backward()
    assert single.weight.grad.shape == (3, 16, 32)
    meta = GroupedLinear(3, 32, 16, single_grouped_weight=True, device="meta").to_empty(
        device=DEVICE
    )
    meta.reset_parameters()
    assert bool(meta.weight.isfinite().all())


def test_a_parameter_of_all_groups_is_shared_over_ranks_along_its_own_dimension() -> None:
    for mode, dim, shape in [("column", 1, (2, 4, 8)), ("row", 2, (2, 8, 4))]:
        arguments: dict[str, Any] = {"tp_size": 2, "parallel_mode": mode, "bias": False}
        layer = GroupedLinear(
            2, 8, 8, single_grouped_weight=True, single_grouped_bias=True, **arguments
        )
        assert (tuple(layer.weight.shape), layer.weight.partition_dim) == (shape, dim)
        assert dict(layer.named_parameters()).keys() == {"weight"}


def test_a_weight_of_all_groups_is_refused_where_groups_are_stored_by_themselves() -> None:
    with quantized_model_init(recipe="current"), pytest.raises(UnsupportedError, match="by itself"):
        GroupedLinear(2, 32, 32, single_grouped_weight=True)
    with pytest.raises(UnsupportedError, match="single_grouped_weight or single_grouped_bias"):
        fp8core.distributed.Experts(GroupedLinear(2, 32, 32, single_grouped_weight=True))


@pytest.mark.usefixtures("first_algorithms")
def test_the_operation_of_groups_has_a_parameter_of_all() -> None:
    torch.manual_seed(0)
    groups = ops.GroupedLinear(3, 32, 16, scale_bias=True)
    torch.manual_seed(0)
    single = ops.GroupedLinear(
        3, 32, 16, scale_bias=True, single_grouped_weight=True, single_grouped_bias=True
    )
    x, scales = torch.randn(8, 32), torch.rand(8)
    assert torch.equal(single(x, SPLITS, scales), groups(x, SPLITS, scales))
    single(x, SPLITS, scales).sum().backward()
    groups(x, SPLITS, scales).sum().backward()
    stacked = torch.stack([getattr(groups, f"bias{group}").grad for group in range(3)])
    assert torch.equal(single.bias.grad, stacked)
