"""FusedSGD beside torch's SGD, and functions of lists of tensors: results, flags, empty lists."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from fp8core import optimizers as te
from fp8core.errors import OperandError, UnsupportedError
from fp8core.optimizers import FusedSGD

BF16 = torch.bfloat16


def flag(value: int = 0) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32)


def lists(*dtypes: torch.dtype) -> list[list[torch.Tensor]]:
    shapes = ((7, 5), (33,), (0,), (2, 3))
    return [
        [torch.randn(s, generator=torch.Generator().manual_seed(n)).to(dtype) for s in shapes]
        for n, dtype in enumerate(dtypes)
    ]


def test_applier_leaves_out_empty_tensors() -> None:
    seen: list[Any] = []
    te.multi_tensor_applier(lambda *given: seen.append(given), flag(), lists(BF16), 3)
    ((chunk, _, (tensors,), three),) = seen
    assert (chunk, three) == (te.multi_tensor_applier.chunk_size, 3)
    assert [one.numel() for one in tensors] == [35, 33, 6]


def test_applier_of_nothing_calls_nothing() -> None:
    assert te.multi_tensor_applier(None, flag(), [[torch.empty(0)]]) is None
    assert te.multi_tensor_applier(None, flag(), [[]]) is None


@pytest.mark.parametrize("by", [0.5, torch.tensor([0.5])])
def test_scale(by: Any) -> None:
    inputs, outputs = lists(BF16, torch.float32)
    noop = flag()
    function = te.multi_tensor_scale if isinstance(by, float) else te.multi_tensor_scale_tensor
    te.multi_tensor_applier(function, noop, [inputs, outputs], by)
    torch.testing.assert_close(outputs[0], inputs[0].float() * 0.5, rtol=0, atol=0)
    assert noop.item() == 0


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_scale_says_what_is_not_finite(value: float) -> None:
    inputs, outputs = lists(torch.float32, torch.float32)
    inputs[1][4] = value
    noop = flag()
    te.multi_tensor_applier(te.multi_tensor_scale, noop, [inputs, outputs], 1.0)
    assert noop.item() == 1


def test_scale_says_which_results_are_beyond_their_dtype() -> None:
    outputs = [torch.zeros(3), torch.zeros(3, dtype=torch.float16)]
    noop = flag()
    te.multi_tensor_scale(1, noop, [[torch.ones(3), torch.full((3,), 70000.0)], outputs], 1.0)
    assert noop.item() == 1


@pytest.mark.parametrize("function", [te.multi_tensor_l2norm, te.multi_tensor_unscale_l2norm])
def test_norms_say_what_is_not_finite(function: Any) -> None:
    by = [torch.ones(1)] if function is te.multi_tensor_unscale_l2norm else []
    for value, expected in ((torch.nan, 1), (torch.inf, 1), (1.0, 0)):
        noop = flag()
        function(1, noop, [[torch.ones(2), torch.tensor([value])]], *by)
        assert noop.item() == expected


def test_norms_of_gradients_that_are_squared_after_unscaling() -> None:
    total, _ = te.multi_tensor_unscale_l2norm(
        1, flag(), [[torch.tensor([3e30, 4e30])]], torch.tensor([1e-30])
    )
    torch.testing.assert_close(total, torch.tensor([5.0]))


def test_norms() -> None:
    (tensors,) = lists(BF16)
    total, each = te.multi_tensor_applier(te.multi_tensor_l2norm, flag(), [tensors], True)
    kept = [one.float() for one in tensors if one.numel()]
    torch.testing.assert_close(each, torch.stack([one.norm() for one in kept]))
    torch.testing.assert_close(total, torch.cat([one.flatten() for one in kept]).norm().reshape(1))
    total, each = te.multi_tensor_applier(te.multi_tensor_l2norm, flag(), [tensors], False)
    assert (total.shape, each.numel()) == ((1,), 0)


def test_norms_of_unscaled_gradients() -> None:
    (tensors,) = lists(torch.float32)
    total, _ = te.multi_tensor_l2norm(1, flag(), [tensors])
    by = torch.tensor([0.25])
    unscaled, each = te.multi_tensor_unscale_l2norm(1, flag(), [tensors], by, True)
    torch.testing.assert_close(unscaled, total * 0.25)
    assert each.numel() == 4


def test_adam_and_its_capturable_form() -> None:
    results = []
    for kind in ("plain", "capturable"):
        given = lists(BF16, BF16, torch.float32, torch.float32, torch.float32)
        given[3] = [one.abs() for one in given[3]]
        numbers = (0.01, 0.9, 0.95, 1e-8, 3, 1, 1, 0.1)
        if kind == "plain":
            te.multi_tensor_applier(te.multi_tensor_adam, flag(), given, *numbers)
        else:
            on_device = (torch.tensor(0.01), 0.9, 0.95, 1e-8, torch.tensor([3], dtype=torch.int32))
            more = (1, 1, 0.1, torch.ones(1))
            function = te.multi_tensor_adam_capturable_master
            te.multi_tensor_applier(function, flag(), given, *on_device, *more)
        results.append(given[4])
    torch.testing.assert_close(results[0], results[1])


@pytest.mark.parametrize("function", ["multi_tensor_adam", "multi_tensor_sgd"])
def test_flag_stops_a_step(function: str) -> None:
    adam = function == "multi_tensor_adam"
    given = lists(*(torch.float32,) * (4 if adam else 3))
    given[-1] = [one.abs() for one in given[-1]]
    before = [[one.clone() for one in group] for group in given]
    numbers: tuple[Any, ...] = (0.01, 0.9, 0.95, 1e-8, 3, 1, 1, 0.1)
    if not adam:
        numbers = (0.1, 0.9, 0.0, 0.1, False, False, False, 1.0)
    te.multi_tensor_applier(getattr(te, function), flag(1), given, *numbers)
    for ours, theirs in zip(given, before, strict=True):
        assert all(torch.equal(one, two) for one, two in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("has_masters", [True, False])
def test_flag_stops_a_step_of_fp8_parameters(has_masters: bool) -> None:
    codes = torch.full((3,), 60, dtype=torch.uint8)
    shaped = [torch.ones(3), codes, *(torch.zeros(3) for _ in range(3 if has_masters else 2))]
    # The scale was updated since the codes were written by the one that scale_inv is of.
    numbers = [torch.tensor([value]) for value in (4.0, 0.0, 0.125)]
    given = [[one] for one in (*shaped, *numbers)]
    before = [one.clone() for (one,) in given]
    te.multi_tensor_adam_fp8(1, flag(1), given, *(0.1, 0.9, 0.9, 1e-8, 1, 1, 1, 0.0), "e4m3")
    assert all(torch.equal(one, two) for (one,), two in zip(given, before, strict=True))


@pytest.mark.parametrize("has_masters", [True, False])
@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_adam_of_fp8_parameters(name: str, has_masters: bool) -> None:
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    masters = torch.randn(9, 7)
    scale, amax, inverse = torch.tensor([64.0]), torch.zeros(1), torch.tensor([1 / 64])
    codes = (masters * 64).to(dtype).view(torch.uint8)
    if not has_masters:
        masters = codes.view(dtype).float() / 64
    grads, m, v = torch.randn(9, 7), torch.zeros(9, 7), torch.zeros(9, 7)
    other = torch.nn.Parameter(masters.clone())
    other.grad = grads.clone()
    torch.optim.AdamW([other], lr=0.1, weight_decay=0.0).step()
    middle = [[masters]] if has_masters else []
    given = [[grads], [codes], [m], [v], *middle, [scale], [amax], [inverse]]
    numbers = (0.1, 0.9, 0.999, 1e-8, 1, 1, 1, 0.0)
    te.multi_tensor_applier(te.multi_tensor_adam_fp8, flag(), given, *numbers, dtype)
    expected = (other.detach() * 64).to(dtype).view(torch.uint8)
    assert (codes != expected).sum() <= 1
    torch.testing.assert_close(amax, other.detach().abs().amax().reshape(1))
    assert inverse.item() == 1 / 64


def test_sgd_writes_copies() -> None:
    given = lists(BF16, torch.float32, torch.float32, BF16)
    numbers = (0.0, 0.9, 0.0, 0.1, False, True, False, 1.0)
    te.multi_tensor_applier(te.multi_tensor_sgd, flag(), given, *numbers)
    for one, other in zip(given[1], given[3], strict=True):
        assert torch.equal(one.to(BF16), other)


def test_sgd_scales_gradients_and_reads_no_momenta_in_a_first_run() -> None:
    param, momentum = torch.tensor([2.0]), torch.tensor([torch.nan])
    given = [[torch.tensor([4.0])], [param], [momentum]]
    te.multi_tensor_sgd(1, flag(), given, 0.5, 0.9, 0.5, 0.1, False, True, False, 0.25)
    assert (param.item(), momentum.item()) == (pytest.approx(1.8), 2.0)  # 4 / 4 + 0.5 * 2
    te.multi_tensor_sgd(1, flag(), given, 0.0, 0.5, 0.5, 0.1, False, False, False, 0.25)
    assert momentum.item() == 1.5
    assert param.item() == pytest.approx(1.65)


def test_sgd_refuses_what_torch_does_not_step() -> None:
    half = [[torch.ones(3)], *([torch.ones(3, dtype=BF16)] for _ in range(2))]
    numbers = (0.1, 0.9, 0.0, 0.1, False, True)
    with pytest.raises(UnsupportedError, match="wd_after_momentum=True"):
        te.multi_tensor_sgd(1, flag(), half, *numbers, True, 1.0)
    with pytest.raises(OperandError, match=r"bfloat16 with a gradient of torch\.float32"):
        te.multi_tensor_sgd(1, flag(), half, *numbers, False, 1.0)
    assert all(torch.equal(tensor, torch.ones_like(tensor)) for (tensor,) in half)


def test_lists_that_do_not_fit_are_named() -> None:
    one = [torch.ones(3)]
    with pytest.raises(OperandError, match="as many in each"):
        te.multi_tensor_applier(te.multi_tensor_scale, flag(), [one, one * 2], 1.0)
    with pytest.raises(OperandError, match="expected 2 lists"):
        te.multi_tensor_scale(1, flag(), [one], 1.0)
    with pytest.raises(OperandError, match="fp8_dtype='e3m4'"):
        te.multi_tensor_adam_fp8(1, flag(), [one] * 7, *(0.1, 0.9, 0.9, 0, 1, 1, 1, 0.0), "e3m4")


def test_a_gradient_of_another_shape_is_refused() -> None:
    tensors = [[torch.ones(1)], *([torch.zeros(5)] for _ in range(3))]
    with pytest.raises(OperandError, match=r"position 0 are \[\[1\], \[5\], \[5\], \[5\]\]"):
        te.multi_tensor_adam(1, flag(), tensors, 0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0)


def test_scale_takes_tensors_without_elements() -> None:
    outputs = [torch.zeros(3), torch.zeros(0)]
    noop = flag()
    te.multi_tensor_scale(1, noop, [[torch.ones(3), torch.zeros(0)], outputs], 2.0)
    assert outputs[0].tolist() == [2.0] * 3
    te.multi_tensor_scale(1, noop, [[torch.zeros(0)], [torch.zeros(0)]], 2.0)
    assert noop.item() == 0


@pytest.mark.parametrize("shape", [(), (0,)])
@pytest.mark.parametrize("has_masters", [True, False])
def test_adam_of_fp8_parameters_of_any_shape(has_masters: bool, shape: tuple[int, ...]) -> None:
    def ones() -> list[list[torch.Tensor]]:
        zero = torch.zeros(shape)
        given = [torch.ones(shape), torch.full(shape, 60, dtype=torch.uint8), zero, zero.clone()]
        if has_masters:
            given.append(torch.ones(shape))
        numbers = [torch.tensor([value]) for value in (4.0, 0.0, 0.25)]
        return [[one] for one in (*given, *numbers)]

    given, vector = ones(), ones()
    vector[:-3] = [[one.reshape(-1)] for (one,) in vector[:-3]]
    for lists_ in (given, vector):
        te.multi_tensor_adam_fp8(
            1, flag(), lists_, 0.1, 0.9, 0.99, 1e-8, 1, 1, 1, 0.0, torch.float8_e4m3fn
        )
    for (one,), (other,) in zip(given, vector, strict=True):
        assert torch.equal(one.reshape(-1), other)


def parameters(dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(4)
    return [
        torch.nn.Parameter(torch.randn(s, generator=generator).to(dtype))
        for s in ((7, 5), (33,), (0, 2))
    ]


def train(kind: Any, params: list[Any], **options: Any) -> None:
    optimizer = kind(params, **options)
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).to(param.dtype)
        optimizer.step()


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"lr": 0.1},
    "decay": {"lr": 0.1, "weight_decay": 0.01},
    "momentum": {"lr": 0.1, "momentum": 0.9},
    "dampening": {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.01},
    "nesterov": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_steps_are_those_of_torch(name: str) -> None:
    ours, theirs = parameters(), parameters()
    train(FusedSGD, ours, **OPTIONS[name])
    train(torch.optim.SGD, theirs, **OPTIONS[name])
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parameters_of_16_bits(dtype: torch.dtype) -> None:
    ours, theirs = parameters(dtype), parameters()
    train(FusedSGD, ours, lr=0.1, momentum=0.9)
    train(torch.optim.SGD, theirs, lr=0.1, momentum=0.9)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.detach().float(), other.detach(), rtol=0.05, atol=0.05)


def test_parameters_of_any_strides() -> None:
    base, gaps = torch.randn(5, 7), torch.randn(7, 10)
    ours = [torch.nn.Parameter(base.t()), torch.nn.Parameter(gaps[:, ::2])]
    theirs = [torch.nn.Parameter(param.detach().clone().contiguous()) for param in ours]
    between = gaps[:, 1::2].clone()
    train(FusedSGD, ours, lr=0.1, momentum=0.9)
    train(torch.optim.SGD, theirs, lr=0.1, momentum=0.9)
    torch.testing.assert_close(ours, theirs)
    assert torch.equal(gaps[:, 1::2], between)


def test_a_parameter_whose_first_gradient_comes_later() -> None:
    ours, theirs = parameters()[:2], parameters()[:2]
    for kind, params in ((FusedSGD, ours), (torch.optim.SGD, theirs)):
        optimizer = kind(params, lr=0.1, momentum=0.9, dampening=0.5)
        for due in (params[:1], params, params):
            optimizer.zero_grad()
            for param in due:
                param.grad = torch.full_like(param, 0.5)
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_gradients_of_fewer_bits_step_float32_parameters() -> None:
    ours, theirs = parameters(), parameters()
    optimizers = [FusedSGD(ours, 0.1, 0.9), FusedSGD(theirs, 0.1, 0.9)]
    for param, reference in zip(ours, theirs, strict=True):
        param.grad_dtype = torch.bfloat16
        param.grad = torch.randn(param.shape).bfloat16()
        reference.grad = param.grad.float()
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_writes_are_counted() -> None:
    param = parameters()[0]
    optimizer = FusedSGD([param], 0.1, 0.9)
    for _ in range(2):
        before = param._version
        param.grad = torch.ones_like(param)
        optimizer.step()
        assert param._version > before


def test_state_is_loaded() -> None:
    ours = parameters()
    optimizer = FusedSGD(ours, 0.1, 0.9)
    again = parameters()
    other = FusedSGD(again, 0.1, 0.9)
    for step in range(3):
        for params in (ours, again):
            for param in params:
                param.grad = torch.full(param.shape, 0.5 + step)
        optimizer.step()
        if step == 0:
            other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            with torch.no_grad():
                for one, two in zip(again, ours, strict=True):
                    one.copy_(two)
        else:
            other.step()
    torch.testing.assert_close(again, ours, rtol=0, atol=0)


def with_state(change: Any) -> Any:
    """Return an optimizer, and its state with that of the second parameter changed."""
    params = parameters()
    optimizer = FusedSGD(params, 0.1, 0.9)
    for param in params:
        param.grad = torch.full(param.shape, 0.5)
    optimizer.step()
    stored = copy.deepcopy(optimizer.state_dict())
    stored["state"][1] = change(stored["state"][1]["momentum_buffer"])
    return optimizer, stored


NO_STATE: dict[str, Any] = {
    r"is \[66\] in the checkpoint": lambda own: {"momentum_buffer": own.repeat(2)},
    "is torch.int32 in the checkpoint": lambda own: {"momentum_buffer": own.int()},
    r"has the states \['exp_avg'\]": lambda own: {"exp_avg": own},
    "the state of parameter 1 is a list": lambda own: [own],
}


@pytest.mark.parametrize("words", NO_STATE)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(words: str) -> None:
    optimizer, stored = with_state(NO_STATE[words])
    before = copy.deepcopy(optimizer.state_dict())
    stored["param_groups"][0]["lr"] = 3.0
    with pytest.raises(OperandError, match=f"FusedSGD.load_state_dict: .*{words}"):
        optimizer.load_state_dict(stored)
    torch.testing.assert_close(optimizer.state_dict(), before, rtol=0, atol=0)


ERRORS: dict[str, Any] = {
    "lr is missing": lambda: FusedSGD(parameters()),
    "FusedSGD(momentum=-1": lambda: FusedSGD(parameters(), 0.1, -1.0),
    "a dampening of 0": lambda: FusedSGD(parameters(), 0.1, 0.9, 0.5, nesterov=True),
    "a parameter of torch.float64": lambda: FusedSGD(parameters(torch.float64), 0.1),
    "a gradient of torch.float32": lambda: step_by_a_float32_gradient(),
}


def step_by_a_float32_gradient() -> None:
    (param, *_) = parameters(torch.bfloat16)
    param.grad_dtype = torch.float32
    param.grad = torch.ones(param.shape)
    FusedSGD([param], 0.1).step()


@pytest.mark.parametrize("words", ERRORS)
def test_what_does_not_fit_is_named(words: str) -> None:
    with pytest.raises(OperandError) as caught:
        ERRORS[words]()
    assert words in str(caught.value)


def test_a_decay_behind_the_momentum_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="multiply the parameters by 1 - lr"):
        FusedSGD(parameters(), 0.1, weight_decay=0.1, wd_after_momentum=True)
