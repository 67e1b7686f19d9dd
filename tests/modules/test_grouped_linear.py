"""GroupedLinear: constructor, ragged and empty groups, and what m_splits may be."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from fp8core import GroupedLinear, Linear, OperandError, UnsupportedError, autocast, recipe
from tests.device import DEVICE, assert_same_sums

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work

RECIPES = {"none": None, **{name: recipe.by_name(name) for name in recipe.names()}}
DETERMINISTIC = [name for name in RECIPES if name != "nvfp4"]
SPLITS = [5, 0, 3]


def forward(layer: GroupedLinear, x: torch.Tensor, splits: Any, name: str) -> Any:
    chosen = RECIPES[name]
    torch.manual_seed(11)
    with autocast(enabled=chosen is not None, recipe=chosen):
        return layer(x, splits)


def test_an_argument_that_is_not_offered_is_refused_by_name() -> None:
    for name in ["single_grouped_weight", "single_grouped_bias"]:
        with pytest.raises(UnsupportedError, match=rf"GroupedLinear\({name}=.*not offered"):
            GroupedLinear(2, 8, 8, **{name: 2})


def test_a_rank_has_its_share_of_the_features() -> None:
    for mode, shape in [("column", (4, 8)), ("row", (8, 4))]:
        layer = GroupedLinear(2, 8, 8, tp_size=2, parallel_mode=mode, bias=False)
        assert tuple(layer.weight0.shape) == tuple(layer.weight1.shape) == shape, (mode, shape)
        assert layer.weight0.partition_dim == (mode == "row"), (mode, shape)
        k = shape[1]
        assert layer(torch.ones(3, k), [1, 2]).shape == (3, shape[0]), (mode, shape)


def test_a_bias_that_each_rank_would_add_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"GroupedLinear\(bias=True\) in a row-parallel"):
        GroupedLinear(2, 8, 8, tp_size=2, parallel_mode="row")


def test_use_grouped_tensor_is_refused_and_without_it_taken() -> None:
    GroupedLinear(2, 8, 8, use_grouped_tensor=False)
    with pytest.raises(UnsupportedError, match=r"GroupedLinear\(use_grouped_tensor=True\)"):
        GroupedLinear(2, 8, 8, use_grouped_tensor=True)


def test_parameters_have_transformer_engine_s_order() -> None:
    names = ["weight0", "bias0", "weight1", "bias1", "weight2", "bias2"]
    layer = GroupedLinear(3, 8, 4)
    assert [name for name, _ in layer.named_parameters()] == names
    assert list(layer.state_dict()) == names


def test_a_count_that_is_no_positive_integer_is_refused() -> None:
    with pytest.raises(OperandError, match="num_gemms=0"):
        GroupedLinear(0, 8, 8)


def test_parameters_are_one_weight_and_bias_a_group() -> None:
    shapes = {name: tuple(p.shape) for name, p in GroupedLinear(2, 6, 4).named_parameters()}
    assert shapes == {"weight0": (4, 6), "weight1": (4, 6), "bias0": (4,), "bias1": (4,)}


def test_without_bias_there_are_only_weights() -> None:
    layer = GroupedLinear(2, 6, 4, bias=False)
    assert list(layer.state_dict()) == ["weight0", "weight1"]
    assert layer.bias0 is None


def test_init_method_fills_every_weight() -> None:
    layer = GroupedLinear(3, 6, 4, init_method=torch.nn.init.ones_)
    assert all(getattr(layer, f"weight{group}").eq(1).all() for group in range(3))


def test_print_says_the_number_of_groups() -> None:
    text = "GroupedLinear(num_gemms=3, in_features=8, out_features=4, bias=False, dtype=float32)"
    assert repr(GroupedLinear(3, 8, 4, bias=False)) == text


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_each_group_has_the_bits_of_a_linear_of_its_own(name: str) -> None:
    layer = GroupedLinear(3, 32, 16)
    for group in range(3):
        torch.nn.init.normal_(getattr(layer, f"bias{group}"))
    x, dy = torch.randn(8, 32, requires_grad=True), torch.randn(8, 16)
    y = forward(layer, x, SPLITS, name)
    y.backward(dy)
    rows = [part.split(SPLITS) for part in (x.detach(), dy, y, x.grad)]
    for group, (x_g, dy_g, y_g, dx_g) in enumerate(zip(*rows, strict=True)):
        alone, leaf = Linear(32, 16), x_g.clone().requires_grad_()
        own = {kind: getattr(layer, f"{kind}{group}") for kind in ("weight", "bias")}
        alone.load_state_dict(own)
        with autocast(enabled=name != "none", recipe=RECIPES[name]):
            wanted = alone(leaf)
        wanted.backward(dy_g)
        got = (y_g, dx_g, own["weight"].grad, own["bias"].grad)
        want = (wanted, leaf.grad, alone.weight.grad, alone.bias.grad)
        for mine, its in zip(got, want, strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=1e-6 if name == "none" else 0)


def test_m_splits_may_be_a_list_a_tuple_or_a_tensor() -> None:
    for name in RECIPES:
        layer, x = GroupedLinear(3, 32, 16), torch.randn(8, 32)
        with torch.no_grad():
            want = forward(layer, x, SPLITS, name)
            for splits in (tuple(SPLITS), torch.tensor(SPLITS), torch.tensor(SPLITS).int()):
                layer.reset_delayed_state()
                assert_same_sums([forward(layer, x, splits, name)], [want])


@pytest.mark.parametrize(
    "splits",
    [[5, 3], [5, 0, 3, 0], [5, 0, 4], [9, -1, 0], [5.0, 0.0, 3.0], [[5, 0, 3]], []],
    ids=str,
)
@pytest.mark.parametrize("as_tensor", [False, True], ids=["list", "tensor"])
def test_m_splits_that_do_not_fit_are_refused(splits: Any, as_tensor: bool) -> None:
    given = torch.tensor(splits) if as_tensor else splits
    said = r"m_splits=.* for 8 rows; expected 3 integers|m_splits is .* an integer tensor \[3\]"
    with pytest.raises(OperandError, match=said):
        GroupedLinear(3, 32, 16)(torch.randn(8, 32), given)


def test_m_splits_that_are_no_sizes_are_refused() -> None:
    for splits in [None, 8, "508", [True, True, 6], [True, 5, 0, 3]]:
        with pytest.raises(OperandError, match="expected 3 integers"):
            GroupedLinear(3, 32, 16)(torch.randn(8, 32), splits)


def test_m_splits_may_be_whatever_counts_as_an_integer() -> None:
    for splits in [
        np.array(SPLITS),
        [np.int64(size) for size in SPLITS],
        list(torch.tensor(SPLITS)),
    ]:
        layer, x = GroupedLinear(3, 32, 16), torch.randn(8, 32)
        assert torch.equal(layer(x, splits), layer(x, SPLITS)), splits


def test_m_splits_on_meta_are_refused_by_name() -> None:
    layer = GroupedLinear(3, 32, 16, device="meta")
    with pytest.raises(OperandError, match="has no values"), autocast(recipe="current"):
        layer(torch.randn(8, 32, device="meta"), torch.tensor(SPLITS, device="meta"))


def test_an_empty_group_gets_zero_gradients() -> None:
    for name in RECIPES:
        layer = GroupedLinear(3, 32, 16)
        forward(layer, torch.randn(8, 32), SPLITS, name).sum().backward()
        assert not layer.weight1.grad.any(), name
        assert not layer.bias1.grad.any(), name


def test_all_groups_may_be_empty() -> None:
    for name in RECIPES:
        layer, x = GroupedLinear(3, 32, 16), torch.randn(0, 32, requires_grad=True)
        y = forward(layer, x, [0, 0, 0], name)
        y.sum().backward()
        assert (y.shape, x.grad.shape) == ((0, 16), (0, 32)), name
        assert not layer.weight0.grad.any(), name


def test_groups_may_change_from_call_to_call() -> None:
    for name in RECIPES:
        layer = GroupedLinear(3, 32, 16)
        for splits in ([1, 2, 3], [0, 0, 7], [4, 0, 0]):
            assert forward(layer, torch.randn(sum(splits), 32), splits, name).shape == (
                sum(splits),
                16,
            ), name


def test_leading_dimensions_are_rows() -> None:
    for name in RECIPES:
        layer, x = GroupedLinear(3, 32, 16), torch.randn(8, 32)
        with torch.no_grad():
            want = forward(layer, x, SPLITS, name)
            layer.reset_delayed_state()
            assert torch.equal(
                forward(layer, x.reshape(2, 4, 32), SPLITS, name).reshape(8, 16), want
            ), name


@pytest.mark.parametrize("name", RECIPES)
def test_return_bias_returns_the_biases_that_were_not_added(name: str) -> None:
    layer = GroupedLinear(3, 32, 16, return_bias=True)
    x = torch.randn(8, 32)
    with torch.no_grad():
        for group in range(3):
            getattr(layer, f"bias{group}").fill_(1000.0)
        y, biases = forward(layer, x, SPLITS, name)
    assert all(bias is getattr(layer, f"bias{group}") for group, bias in enumerate(biases))
    assert y.abs().max() < 100


def test_torch_autocast_gives_its_dtype_and_gradients_in_the_parameters() -> None:
    for name in RECIPES:
        layer = GroupedLinear(3, 32, 16)
        with torch.autocast(DEVICE.type, torch.bfloat16):
            y = forward(layer, torch.randn(8, 32), SPLITS, name)
        y.sum().backward()
        assert (y.dtype, layer.weight0.grad.dtype) == (torch.bfloat16, torch.float32), name


def test_shape_is_known_on_meta() -> None:
    for name in RECIPES:
        layer = GroupedLinear(3, 40, 24, device="meta")
        y = forward(layer, torch.empty(8, 40, device="meta"), SPLITS, name)
        assert (y.shape, y.device.type) == ((8, 24), "meta"), name


def test_each_group_has_slots_of_its_own() -> None:
    layer = GroupedLinear(3, 32, 16)
    x = torch.cat([torch.full((5, 32), 2.0), torch.full((3, 32), 7.0)])
    forward(layer, x, SPLITS, "delayed").sum().backward()
    assert layer.scale_fwd.shape == (9,)
    assert layer.amax_history_fwd[-1, 0::3].tolist() == [2.0, 0.0, 7.0]
    assert layer.amax_history_bwd[-1, 0::2].tolist() == [1.0, 0.0, 1.0]


def test_an_empty_group_keeps_the_scale_of_its_input() -> None:
    layer = GroupedLinear(2, 32, 16)
    forward(layer, torch.full((4, 32), 7.0), [2, 2], "delayed")
    before = layer.scale_fwd[3].item()
    forward(layer, torch.full((4, 32), 1.0), [4, 0], "delayed")
    assert layer.scale_fwd[3].item() == before == 64.0


def test_calibrating_records_each_group() -> None:
    layer = GroupedLinear(3, 32, 16)
    x = torch.cat([torch.full((5, 32), 2.0), torch.full((3, 32), 7.0)])
    with autocast(enabled=False, calibrating=True, recipe=RECIPES["delayed"]):
        layer(x, SPLITS)
    assert layer.amax_history_fwd[-1, 0::3].tolist() == [2.0, 0.0, 7.0]
    weights = [getattr(layer, f"weight{group}").abs().max().item() for group in range(3)]
    assert layer.amax_history_fwd[-1, 1::3].tolist() == weights


def test_a_deep_copy_has_a_state_of_its_own() -> None:
    layer = GroupedLinear(3, 32, 16)
    forward(layer, torch.full((8, 32), 2.0), SPLITS, "delayed")
    twin = copy.deepcopy(layer)
    forward(twin, torch.full((8, 32), 7.0), SPLITS, "delayed")
    assert layer.amax_history_fwd[-1, 0] == 2.0
    assert twin.amax_history_fwd[-1, 0] == 7.0


def test_a_parametrized_weight_is_used() -> None:
    layer = GroupedLinear(3, 32, 16)
    torch.nn.utils.parametrizations.weight_norm(layer, "weight0")
    forward(layer, torch.randn(8, 32), SPLITS, "current").sum().backward()
    assert layer.parametrizations.weight0.original0.grad is not None
