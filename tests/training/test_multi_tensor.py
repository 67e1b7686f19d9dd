"""Functions of lists of tensors: results, flags, empty lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8core import optimizers as te
from fp8core.errors import OperandError, UnsupportedError

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
