"""ops.Sequential as a container: its list, its chains, and the modules between them."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import pytest
import torch

import fp8core
from fp8core import OperandError, autocast, ops
from fp8core.ops import basic_operation
from tests.device import DEVICE, assert_same_sums

CHOSEN = [None, "current", "delayed", "mxfp8"]


def run(layer: Any, x: torch.Tensor, chosen: Any, *extra: Any) -> list[torch.Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    with autocast(enabled=chosen is not None, recipe=chosen):
        y = layer(x, *extra)
    y.backward(torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype))
    grads = [parameter.grad for parameter in layer.parameters()]
    return [y.detach(), x.grad, *[grad.clone() for grad in grads if grad is not None]]  # type: ignore[list-item]


def names(sequential: ops.Sequential) -> list[str]:
    return [type(module).__name__ for module in sequential]


def test_it_is_a_list() -> None:
    made = ops.Sequential(ops.GELU(), ops.ReLU())
    made.append(ops.SiLU()).extend([ops.SReLU()]).insert(1, ops.Identity())
    assert names(made) == ["GELU", "Identity", "ReLU", "SiLU", "SReLU"]
    assert len(made) == 5
    assert isinstance(made[-1], ops.SReLU)
    assert names(made[1:4]) == ["Identity", "ReLU", "SiLU"]
    assert isinstance(made[1:4], ops.Sequential)
    made[0] = ops.QGELU()
    del made[1:3]
    assert names(made) == ["QGELU", "SiLU", "SReLU"]
    assert isinstance(made.pop(idx=0), ops.QGELU)
    longer = made + [ops.ReLU()]  # noqa: RUF005  the operator is what is tested
    assert names(longer) == ["SiLU", "SReLU", "ReLU"]
    made += [ops.ReLU()]
    assert names(made) == ["SiLU", "SReLU", "ReLU"]
    assert list(made) == list(made.children())


def test_names_go_on_after_the_largest() -> None:
    made = ops.Sequential(OrderedDict(first=ops.Linear(4, 4), act=ops.GELU()))
    made.append(ops.Linear(4, 4))
    assert list(made.state_dict()) == ["first.weight", "first.bias", "0.weight", "0.bias"]
    del made[0]
    made.append(ops.Bias(4))
    assert [name for name, _ in made.named_children()] == ["act", "0", "1"]


def test_insert_keeps_the_keys_in_order() -> None:
    made = ops.Sequential(ops.GELU(), ops.SiLU())
    made.insert(idx=0, module=ops.ReLU())
    assert [name for name, _ in made.named_children()] == ["0", "1", "2"]
    assert names(made) == ["ReLU", "GELU", "SiLU"]


@pytest.mark.parametrize("index", [2, -3])
def test_an_index_out_of_range_is_pythons_error(index: int) -> None:
    made = ops.Sequential(ops.GELU(), ops.SiLU())
    with pytest.raises(IndexError, match=f"index {index} of 2"):
        _ = made[index]
    with pytest.raises(IndexError):
        made[index] = ops.GELU()


def test_what_is_no_module_is_refused_and_changes_nothing() -> None:
    made: Any = ops.Sequential(ops.GELU())
    for change in (
        lambda: made.append("gelu"),
        lambda: made.insert(0, torch.relu),
        lambda: made.__setitem__(0, None),
    ):
        with pytest.raises(OperandError, match=r"torch\.nn\.Module"):
            change()
    assert names(made) == ["GELU"]


def test_an_empty_one_returns_its_input() -> None:
    x = torch.randn(2, 3)
    assert ops.Sequential()(x) is x
    assert ops.Sequential(ops.Identity(), ops.Sequential())(x) is x


@pytest.mark.parametrize("chosen", CHOSEN)
def test_a_torch_module_runs_between_two_chains(chosen: Any) -> None:
    torch.manual_seed(0)
    parts = [ops.Linear(32, 64), torch.nn.Tanh(), ops.RMSNorm(64), ops.Linear(64, 32)]
    made = ops.Sequential(*parts)
    before, after = (
        ops.Sequential(copy.deepcopy(parts[0])),
        ops.Sequential(*copy.deepcopy(parts[2:])),
    )
    x = torch.randn(32, 32)
    for _ in range(2):
        got = run(made, x, chosen)
        hand = torch.nn.Sequential(before, torch.nn.Tanh(), after)
        want = run(hand, x, chosen)
        assert all(map(torch.equal, got, want))
    if chosen == "delayed":
        count = before.scale_fwd.numel()
        assert torch.equal(made.scale_fwd[:count], before.scale_fwd)
        assert torch.equal(made.scale_fwd[count:], after.scale_fwd)
        assert torch.equal(made.amax_history_bwd[:, -2:], after.amax_history_bwd)


def test_two_equal_chains_keep_their_own_scales_and_weights() -> None:
    torch.manual_seed(0)
    made = ops.Sequential(ops.Linear(32, 32), torch.nn.Tanh(), ops.Linear(32, 32))
    with torch.no_grad():
        made[2].weight.mul_(8)
    x = torch.randn(32, 32)
    for _ in range(2):
        run(made, x, "delayed")
    assert made.scale_fwd[1] != made.scale_fwd[4]  # the weights'
    plain = made(x)
    with fp8core.frozen_weights(made), torch.no_grad(), autocast(recipe="current"):
        first, again = made(x), made(x)
    assert torch.equal(first, again)
    assert (first - plain).norm() < 0.1 * plain.norm()


def test_changing_it_forgets_delayed_scales_of_another_chain() -> None:
    made = ops.Sequential(ops.Linear(32, 32))
    run(made, torch.randn(32, 32), "delayed")
    made.append(ops.Linear(32, 32))
    assert not hasattr(made, "scale_fwd")
    run(made, torch.randn(32, 32), "delayed")
    assert made.scale_fwd.numel() == 6


def test_sizes_are_looked_at_again_after_a_change() -> None:
    made = ops.Sequential(ops.Linear(8, 16), ops.Linear(16, 8))
    made[0] = ops.Linear(8, 4)
    with pytest.raises(OperandError, match="operation 1, Linear"):
        made(torch.zeros(2, 8))
    made[1] = ops.Linear(4, 8)
    assert made(torch.zeros(2, 8)).shape == (2, 8)


def test_reset_gives_first_values_and_forgets_scales() -> None:
    torch.manual_seed(0)
    made = ops.Sequential(ops.Linear(32, 32), torch.nn.Linear(32, 32), ops.Sequential(ops.Bias(32)))
    start = copy.deepcopy(made.state_dict())
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.fill_(7)
    run(made, torch.randn(32, 32), "delayed")
    torch.manual_seed(0)
    made.reset()
    assert not any(name.startswith("scale") for name in made.state_dict())
    assert all(torch.equal(value, start[name]) for name, value in made.state_dict().items())


def test_the_same_operation_twice_runs_twice() -> None:
    linear = ops.Linear(8, 8)
    x = torch.randn(2, 8)
    assert torch.equal(ops.Sequential(linear, linear)(x), linear(linear(x)))


def test_prepare_names_the_layers_that_run_by_themselves() -> None:
    made = ops.Sequential(
        ops.Linear(8, 8), ops.GroupedLinear(2, 8, 8), torch.nn.Sequential(fp8core.Linear(8, 8))
    )
    fp8core.prepare(made, "delayed")
    assert made[1].name == "1"
    assert made.scale_fwd.numel() == 3
    assert made[1].scale_fwd.numel() == 6
    assert made[2][0].scale_fwd.numel() == 3
    assert not hasattr(made[0], "scale_fwd")
    assert made[2][0].name == "2.0"


@pytest.mark.usefixtures("first_algorithms")
@pytest.mark.parametrize("chosen", [None, "current"])
def test_groups_run_by_themselves_and_take_their_sizes(chosen: Any) -> None:
    torch.manual_seed(0)
    made = ops.Sequential(
        ops.GroupedLinear(2, 32, 64), ops.SwiGLU(), ops.GroupedLinear(2, 32, 16, bias=False)
    )
    x, splits = torch.randn(24, 32), [8, 16]
    y = run(made, x, chosen, splits, torch.tensor(splits))
    with autocast(enabled=chosen is not None, recipe=chosen):
        want = made[2](made[1](made[0](x, splits)), splits)
    assert_same_sums([y[0]], [want], in_fp8=chosen is not None)
    with pytest.raises(OperandError, match="got 1 extra inputs for 2 operations"):
        made(x, splits)


def test_keyword_arguments_reach_the_operation_that_they_are_for() -> None:
    made = ops.Sequential(ops.GroupedLinear(2, 32, 64), ops.GELU())
    x, out, grad = torch.randn(8, 32, requires_grad=True), torch.empty(8, 64), torch.empty(8, 32)
    y = made(x, [4, 4], op_kwargs={0: {"output": out, "grad_input": grad}})
    y.sum().backward()
    assert torch.equal(out, made[0](x, [4, 4]))
    assert torch.equal(grad, x.grad)
    for key in (1, made[1]):
        with pytest.raises(
            OperandError, match="op_kwargs for GELU, which has no argument 'output'"
        ):
            made(x, [4, 4], op_kwargs={key: {"output": out}})
    with pytest.raises(OperandError, match="op_kwargs for GELU, which is not in it"):
        made(x, [4, 4], op_kwargs={ops.GELU(): {"output": out}})
    with pytest.raises(OperandError, match="op_kwargs for 'GELU', which is not in it"):
        made(x, [4, 4], op_kwargs={"GELU": {"output": out}})  # type: ignore[dict-item]


def microbatched() -> ops.Sequential:
    torch.manual_seed(0)
    return ops.Sequential(
        ops.Linear(32, 64),
        ops.GELU(),
        torch.nn.Tanh(),
        ops.Sequential(fp8core.Linear(64, 32), torch.nn.Tanh()),
        fp8core.LayerNormMLP(32, 32),
    )


@pytest.mark.parametrize("chosen", ["current", "delayed", "mxfp8"])
def test_the_first_microbatch_quantizes_the_weights_of_all_layers(chosen: str) -> None:
    made, x = microbatched(), torch.randn(32, 32)
    with autocast(recipe=chosen):
        want = [made(x), made(x)]
        made.reset_delayed_state()
        for layer in (made[3], made[4]):
            layer.reset_delayed_state()
        got = [made(x, is_first_microbatch=first) for first in (True, False)]
        assert all(map(torch.equal, got, want))
        for number, weight in enumerate(p for p in made.parameters() if p.dim() == 2):
            with torch.no_grad():
                weight.mul_(2)  # which the next microbatch of each layer refuses to have missed
            with pytest.raises(OperandError, match="was written since"):
                made(x, is_first_microbatch=False)
            made(x, is_first_microbatch=True)
            assert number < 4
    with pytest.raises(OperandError, match="is_first_microbatch=2: expected"):
        made(x, is_first_microbatch=2)  # type: ignore[arg-type]


def test_a_first_microbatch_of_one_chain_keeps_its_weight() -> None:
    class Twice(ops.BasicOperation):
        def op_forward(self, ctx: Any, input_: torch.Tensor, **quantizers: Any) -> torch.Tensor:
            assert not any(quantizers.values())  # the layers' argument is none of its
            return 2 * input_

    x = torch.randn(32, 32)
    made = ops.Sequential(ops.Linear(32, 32), Twice(), torch.nn.Tanh())
    with autocast(recipe="current"), torch.no_grad():
        want = made(x, is_first_microbatch=True)
        assert torch.equal(made(x, is_first_microbatch=False), want)
        made[0].weight.data.mul_(2)  # which torch does not count
        assert torch.equal(made(x, is_first_microbatch=False), want)
        assert not torch.equal(made(x), want)


@pytest.mark.parametrize("chosen", ["current", "delayed"])
def test_keyword_arguments_reach_a_layer_of_a_chain(chosen: str) -> None:
    torch.manual_seed(0)
    made = ops.Sequential(ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 32), ops.Linear(32, 16))
    x, keys = torch.randn(32, 32), set(made.state_dict())
    with autocast(recipe=chosen):
        y = made(x, op_kwargs={-1: {"fp8_output": True}})
        inner = made[2]
        made(x, op_kwargs={inner: {"is_first_microbatch": True}})
    assert isinstance(y, fp8core.QuantizedTensor)
    plain = ops.Sequential(*made[:-1])
    with autocast(recipe=chosen):
        want = made[-1](plain(x), fp8_output=True)
    if chosen == "current":
        assert torch.equal(y.dequantize(), want.dequantize())
        assert set(made.state_dict()) == keys
    with pytest.raises(OperandError, match="op_kwargs has 3 for Linear; expected a mapping"):
        made(x, op_kwargs={0: 3})  # type: ignore[dict-item]
    queued = ops.Sequential(fp8core.Linear(32, 32, delay_wgrad_compute=True))
    with pytest.raises(OperandError, match="left to the Sequential"):
        queued(x, op_kwargs={0: {"is_first_microbatch": True}})


class Scale(ops.BasicOperation):
    def op_forward(self, ctx: Any, input_: torch.Tensor, *, by: float = 1.0, **_: Any) -> Any:
        return input_ * by


class Fused(ops.FusedOperation):
    def fuser_forward(self, contexts: Any, input_: torch.Tensor, **_: Any) -> Any:
        return input_, [() for _ in contexts]


def test_keyword_arguments_of_no_single_operation_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, twice, once = torch.randn(4, 8), Scale(), Scale()
    made = ops.Sequential(twice, once, twice)
    for key in (0, 2, twice):
        with pytest.raises(OperandError, match=r"op_kwargs for .*, which is in it 2 times"):
            made(x, op_kwargs={key: {"by": 2.0}})
    with pytest.raises(OperandError, match="op_kwargs for Scale, which an earlier key names"):
        made(x, op_kwargs={1: {"by": 2.0}, once: {"by": 3.0}})
    assert torch.equal(made(x, op_kwargs={1: {"by": 2.0}}), 2 * x)
    monkeypatch.setattr(basic_operation, "_fusions", [lambda found, *, recipe: [Fused(found)]])
    with pytest.raises(OperandError, match=r"op_kwargs for 1, .* or a fusion replaces it"):
        made(x, op_kwargs={1: {"by": 2.0}})


def test_a_call_that_names_its_microbatch_compiles() -> None:
    made, x = microbatched(), torch.randn(32, 32)
    torch._dynamo.reset()
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    for first in (None, True, False):
        with autocast(recipe="current"):
            assert torch.equal(compiled(x, is_first_microbatch=first), made(x))


# --- extra outputs and channels ---


@pytest.mark.parametrize("chosen", CHOSEN)
def test_an_extra_output_leaves_and_brings_its_gradient(chosen: Any) -> None:
    torch.manual_seed(0)
    made = ops.Sequential(ops.Linear(32, 32), ops.MakeExtraOutput(), ops.Linear(32, 32))
    x = torch.randn(32, 32, requires_grad=True)
    with autocast(enabled=chosen is not None, recipe=chosen):
        y, middle = made(x)
        want = made[0](x)
    if chosen != "delayed":  # its scales are those of the Sequential
        assert torch.equal(middle, want)
    grads = torch.autograd.grad((y.sum() + 3 * middle.sum()), [x, made[0].weight])
    with autocast(enabled=chosen is not None, recipe=chosen):
        y, middle = made(x)
    both = [
        torch.autograd.grad(one.sum(), [x, made[0].weight], retain_graph=True)
        for one in (y, 3 * middle)
    ]
    for got, first, second in zip(grads, *both, strict=True):
        assert (got - first - second).norm() <= 0.1 * got.norm()


@pytest.mark.parametrize(("chosen", "dtype"), [(None, torch.float16), ("current", torch.bfloat16)])
def test_an_rms_norm_adds_the_gradient_of_an_extra_output_before_rounding(
    chosen: Any, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    made = ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "skip", output_to_caller=False),
        ops.RMSNorm(32, dtype=dtype),
        ops.Linear(32, 32, dtype=dtype),
        ops.AddExtraInput().set_extra_input_channel(0, "skip"),
    )
    x, grad = (torch.randn(2, 16, 32, dtype=dtype) for _ in range(2))
    x.requires_grad_()
    wide = x.detach().float().requires_grad_()
    with autocast(enabled=chosen is not None, recipe=chosen):
        got = torch.autograd.grad(made(x), x, grad)[0]
        between = made[1](x.detach()).requires_grad_()
        grad_norm = torch.autograd.grad(made[2](between), between, grad)[0]
    normed = torch.nn.functional.rms_norm(wide, (32,), eps=made[1].eps)
    exact = torch.autograd.grad(normed, wide, grad_norm.float())[0] + grad.float()
    # torch adds the 32 terms of a row's means in another order, 64 steps of 2^-24 of their size
    # apart, with a margin of 2; a second rounding is off by up to a whole step of the dtype.
    slack = 2**-17 * (exact.abs() + grad.float().abs() + 1)
    error = (got.float() - exact).abs()
    half_step = torch.finfo(dtype).eps / 2 * exact.abs()
    assert (error <= half_step + slack).all()


@pytest.mark.parametrize(
    ("following", "in_place"),
    [(ops.LayerNorm(32), False), (ops.RMSNorm(32), True), (ops.Linear(32, 32), False)],
)
def test_gradients_of_other_extra_outputs_are_added_rounded(following: Any, in_place: bool) -> None:
    torch.manual_seed(0)
    following = copy.deepcopy(following).bfloat16()
    made = ops.Sequential(ops.MakeExtraOutput(in_place=in_place), following)
    x = torch.randn(16, 32, dtype=torch.bfloat16, requires_grad=True)
    grads = [torch.randn_like(x), torch.randn_like(x)]
    own = torch.autograd.grad(following(x), x, grads[0])[0]
    assert torch.equal(torch.autograd.grad(made(x), x, grads)[0], own + grads[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_gradient_of_an_input_that_is_widened_is_rounded_once(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    norm = ops.RMSNorm(32)
    x = torch.randn(16, 32).to(dtype).requires_grad_()
    grads = [torch.randn(16, 32), torch.randn(16, 32).to(dtype)]
    wide = x.detach().float().requires_grad_()
    own = torch.autograd.grad(norm(wide), wide, grads[0])[0]
    y, extra = ops.Sequential(ops.MakeExtraOutput(), norm)(x)
    assert extra.dtype == dtype
    assert torch.equal(extra, x)
    grad = torch.autograd.grad([y, extra], x, grads)[0]
    assert torch.equal(grad, (own + grads[1].float()).to(dtype))


def test_one_output_of_two_may_have_no_gradient() -> None:
    made = ops.Sequential(ops.MakeExtraOutput(), ops.RMSNorm(32))
    x = torch.randn(4, 32, requires_grad=True)
    y, extra = made(x)
    alone = torch.autograd.grad(made[1](x).sum(), x)[0]
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], alone)
    extra.sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 32))
    assert made[1].weight.grad is None


def test_second_derivatives_see_the_gradient_of_an_extra_output() -> None:
    torch.manual_seed(0)
    made = ops.Sequential(ops.MakeExtraOutput(), ops.RMSNorm(8))
    x = torch.randn(4, 8, requires_grad=True)
    weights = torch.randn(2, 4, 8)

    def second(y: torch.Tensor, extra: torch.Tensor) -> torch.Tensor:
        loss = (weights[0] * y).sum() + (weights[1] * extra**3).sum()
        grad = torch.autograd.grad(loss, x, create_graph=True)[0]
        return torch.autograd.grad(grad.square().sum(), x)[0]

    want = second(torch.nn.functional.rms_norm(x, (8,), eps=made[1].eps), x)
    torch.testing.assert_close(second(*made(x)), want)


def test_an_extra_output_is_not_converted() -> None:
    made = ops.Sequential(ops.MakeExtraOutput(), ops.RMSNorm(8, dtype=torch.bfloat16))
    x = torch.randn(4, 8, requires_grad=True)
    assert made(x)[1] is x


@pytest.mark.parametrize("is_public", [False, True])
def test_a_channel_leads_to_a_later_operation(is_public: bool) -> None:
    torch.manual_seed(0)
    made = ops.Sequential(
        ops.MakeExtraOutput().set_extra_output_channel(0, "skip", output_to_caller=is_public),
        ops.Linear(8, 8),
        ops.AddExtraInput().set_extra_input_channel(0, "skip"),
    )
    x = torch.randn(4, 8)
    y = made(x)
    assert isinstance(y, tuple) is is_public
    assert torch.equal(y[0] if is_public else y, made[1](x) + x)
    with pytest.raises(OperandError, match="got 1 extra inputs for 0"):
        made(x, x)


def test_a_channel_can_be_taken_back() -> None:
    add = ops.AddExtraInput().set_extra_input_channel(0, "skip").set_extra_input_channel(0, None)
    assert add.input_channels == [None]


def test_a_nested_one_with_an_extra_output_runs_by_itself() -> None:
    inner = ops.Sequential(ops.Linear(8, 8), ops.MakeExtraOutput())
    made = ops.Sequential(ops.Bias(8), inner, ops.AddExtraInput())
    x, extra = torch.randn(2, 8), torch.randn(2, 8)
    y, middle = made(x, extra)
    assert torch.equal(y, middle + extra)


# --- dtypes ---


def test_operations_compute_in_the_dtype_of_their_parameters() -> None:
    torch.manual_seed(0)
    made = ops.Sequential(
        ops.LayerNorm(32, dtype=torch.float32),
        ops.Linear(32, 32, dtype=torch.bfloat16),
        ops.GELU(),
        ops.Linear(32, 16, dtype=torch.float32),
    )
    x = torch.randn(4, 32, dtype=torch.float16, requires_grad=True)
    y = made(x)
    assert y.dtype == torch.float32
    step = made[1](made[0](x.float()).bfloat16())
    assert torch.equal(y, made[3](made[2](step).float()))
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float16
    assert [p.grad.dtype for p in made.parameters()] == [p.dtype for p in made.parameters()]  # type: ignore[union-attr]


@pytest.mark.parametrize("chosen", ["current", "delayed", "mxfp8"])
def test_mixed_dtypes_train_in_low_precision(chosen: str) -> None:
    torch.manual_seed(0)
    made = ops.Sequential(ops.RMSNorm(32), ops.Linear(32, 64, dtype=torch.bfloat16), ops.SwiGLU())
    x = torch.randn(32, 32)
    got = run(made, x, chosen)
    exact = run(made, x, None)
    for low, high in zip(got, exact, strict=True):
        assert (low.float() - high.float()).norm() < 0.15 * high.float().norm()


@pytest.mark.parametrize(
    "operation", [ops.Linear(8, 8), ops.Bias(8), ops.LayerNorm(8), ops.BasicLinear(8, 8)]
)
def test_an_operation_alone_casts_its_input(operation: Any) -> None:
    x = torch.randn(4, 8, dtype=torch.bfloat16)
    y = operation(x)
    assert y.dtype == torch.float32
    assert torch.equal(y, operation(x.float()))


def test_under_torch_autocast_nothing_is_cast_to_a_parameter() -> None:
    made = ops.Sequential(ops.LayerNorm(8), ops.Linear(8, 8))
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        assert made(torch.randn(2, 8)).dtype == torch.bfloat16


# --- around it ---


@pytest.mark.parametrize("chosen", [None, "current"])
def test_it_compiles_with_modules_between(chosen: Any) -> None:
    torch.manual_seed(0)
    made = ops.Sequential(
        ops.Linear(32, 32), torch.nn.Tanh(), ops.Reshape((4, -1, 32)), ops.Linear(32, 16)
    )
    x = torch.randn(32, 32)
    want = run(made, x, chosen)
    torch._dynamo.reset()
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, run(compiled, x, chosen), want))


def test_a_recompute_repeats_it() -> None:
    torch.manual_seed(0)
    made = ops.Sequential(ops.Linear(32, 32), torch.nn.Tanh(), ops.Linear(32, 32))
    x = torch.randn(32, 32)
    for chosen in ("delayed", "mxfp8"):
        made.reset_delayed_state()
        want = run(made, x, chosen)
        made.reset_delayed_state()
        got = run(made, x, None)
        x2 = x.clone().requires_grad_()
        made.zero_grad()
        made.reset_delayed_state()
        with autocast(recipe=chosen):
            y = fp8core.checkpoint(made, x2, use_reentrant=False)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
        got = [y.detach(), x2.grad, *[p.grad for p in made.parameters()]]
        assert all(map(torch.equal, got, want))


def test_delayed_weight_gradients_are_its_own() -> None:
    torch.manual_seed(0)
    made = ops.Sequential(
        fp8core.Linear(32, 32, delay_wgrad_compute=True),
        torch.nn.Tanh(),
        fp8core.Linear(32, 32, delay_wgrad_compute=True),
        ops.GroupedLinear(2, 32, 8, delay_wgrad_compute=True),
    )
    plain = ops.Sequential(
        fp8core.Linear(32, 32), torch.nn.Tanh(), fp8core.Linear(32, 32), ops.GroupedLinear(2, 32, 8)
    )
    plain.load_state_dict(made.state_dict())
    x = torch.randn(32, 32)
    for one in (made, plain):
        run(one, x, "current", [16, 16])
    assert made[0].weight.grad is None
    assert made.need_backward_dw()
    made.backward_dw()
    for (name, mine), theirs in zip(made.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad), name  # type: ignore[arg-type]


def test_explain_leaves_out_what_modules_between_hold() -> None:
    made = ops.Sequential(ops.Linear(32, 64), torch.nn.Linear(64, 48), ops.Linear(48, 16))
    told = fp8core.explain(made, "current")
    assert {layer for layer, _ in told.held} == {"0", "2"}
    assert {line.step for line in told.lines} >= {"fprop", "fprop[0]", "fprop[1]"}


def test_a_monitor_sees_chains_and_layers_that_run_by_themselves() -> None:
    made = ops.Sequential(
        ops.Linear(32, 32), torch.nn.Tanh(), ops.Linear(32, 32), ops.GroupedLinear(2, 32, 32)
    )
    with fp8core.monitor(made) as watch:
        run(made, torch.randn(64, 32), "mxfp8", [32, 32])
        watch.step()
    assert {row.layer for row in watch.rows} == {"Sequential[0]", "Sequential[1]", "3"}
