"""Cross entropy of logits, beside torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fp8core.cross_entropy import parallel_cross_entropy
from fp8core.errors import OperandError, UnsupportedError
from tests.device import VALUES_ARE_READ
from tests.pairs import turns

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def sample(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(3, 4, 50, generator=generator) * 3
    target = torch.randint(0, 50, (3, 4), generator=generator)
    target[1, 2] = -100
    return x.to(dtype), target


def in_torch(x: torch.Tensor, target: torch.Tensor, **named: Any) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return torch.nn.functional.cross_entropy(
        rows.float() if x.dtype != torch.float64 else rows, target.reshape(-1), **named
    )


@pytest.mark.parametrize(
    ("dtype", "smoothing"), [*turns(FLOATS, [0.0, 0.1, 1.0]), (torch.float32, 0.1)]
)
def test_loss_of_each_position(dtype: torch.dtype, smoothing: float) -> None:
    x, target = sample(dtype)
    loss = parallel_cross_entropy(x, target, smoothing)
    expected = in_torch(x, target, label_smoothing=smoothing, reduction="none")
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, expected.reshape(3, 4))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mean_over_the_positions_that_count(smoothing: float) -> None:
    x, target = sample()
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss = parallel_cross_entropy(leaf, target, smoothing, reduce_loss=True)
    expected = in_torch(other, target, label_smoothing=smoothing)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(leaf.grad, other.grad)
    assert not leaf.grad[1, 2].any()


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradient_is_in_the_dtype_of_the_logits(dtype: torch.dtype) -> None:
    x, target = sample(dtype)
    leaf, other = x.clone().requires_grad_(), x.float().requires_grad_()
    parallel_cross_entropy(leaf, target).sum().backward()
    in_torch(other, target, reduction="sum").backward()
    torch.testing.assert_close(leaf.grad, other.grad.to(dtype))


def test_backward_may_run_twice_and_leaves_the_logits() -> None:
    x, target = sample()
    leaf = x.clone().requires_grad_()
    loss = parallel_cross_entropy(leaf, target, overwrite_input=True).sum()
    (first,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(loss, leaf)
    assert torch.equal(first, second)
    assert torch.equal(leaf, x)


def test_float64_is_not_rounded_in_backward() -> None:
    x, target = sample(torch.float64)
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    parallel_cross_entropy(leaf, target, 0.1).sum().backward()
    in_torch(other, target, label_smoothing=0.1, reduction="sum").backward()
    torch.testing.assert_close(leaf.grad, other.grad, rtol=0, atol=1e-15)


def test_derivatives_of_both_orders() -> None:
    x, target = sample(torch.float64)
    leaf = x[:1].clone().requires_grad_()

    def run(x: torch.Tensor) -> torch.Tensor:
        return parallel_cross_entropy(x, target[:1], 0.1)

    assert torch.autograd.gradcheck(run, (leaf,))
    assert torch.autograd.gradgradcheck(run, (leaf,))


def test_torch_func_sees_the_loss() -> None:
    x, target = sample()

    def run(x: torch.Tensor) -> torch.Tensor:
        return parallel_cross_entropy(x, target, reduce_loss=True)

    leaf = x.clone().requires_grad_()
    run(leaf).backward()
    torch.testing.assert_close(torch.func.grad(run)(x), leaf.grad)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_compiled_in_one_graph() -> None:
    x, target = sample(torch.bfloat16)
    leaf, other = x.clone().requires_grad_(), x.clone().requires_grad_()

    def run(x: torch.Tensor) -> torch.Tensor:
        return parallel_cross_entropy(x, target, 0.1, reduce_loss=True)

    loss = torch.compile(run, fullgraph=True, backend="aot_eager")(leaf)
    loss.backward()
    expected = run(other)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(leaf.grad, other.grad)


def test_another_target_is_ignored() -> None:
    x, target = sample()
    target[target == -100] = 7
    loss = parallel_cross_entropy(x, target, ignore_idx=7)
    expected = in_torch(x, target, ignore_index=7, reduction="none").reshape(3, 4)
    torch.testing.assert_close(loss, expected)


def test_strides_do_not_matter() -> None:
    x, target = sample()
    spread = x.transpose(0, 1).contiguous().transpose(0, 1)
    expected = parallel_cross_entropy(x, target)
    assert torch.equal(parallel_cross_entropy(spread, target), expected)
    wide = torch.randn(3, 4, 100)[..., ::2]
    copied = parallel_cross_entropy(wide.contiguous(), target)
    torch.testing.assert_close(parallel_cross_entropy(wide, target), copied)


def test_no_positions() -> None:
    x = torch.empty(0, 4, 50, requires_grad=True)
    loss = parallel_cross_entropy(x, torch.empty(0, 4, dtype=torch.int64))
    assert loss.shape == (0, 4)
    loss.sum().backward()


ERRORS: dict[str, Any] = {
    "inp is torch.int64": lambda x, t: parallel_cross_entropy(x.long(), t),
    "target is torch.int32": lambda x, t: parallel_cross_entropy(x, t.int()),
    "target has 8 elements": lambda x, t: parallel_cross_entropy(x, t[:2]),
    "target has 50; expected classes from 0 to 49": lambda x, t: parallel_cross_entropy(
        x, torch.full_like(t, 50)
    ),
    "target has -1": lambda x, t: parallel_cross_entropy(x, torch.full_like(t, -1)),
    "label_smoothing=1.5": lambda x, t: parallel_cross_entropy(x, t, 1.5),
    "at least one class": lambda x, t: parallel_cross_entropy(x[..., :0], t),
}


OF_VALUES = {"target has 50; expected classes from 0 to 49", "target has -1"}


@pytest.mark.parametrize(
    "words",
    [pytest.param(words, marks=VALUES_ARE_READ if words in OF_VALUES else ()) for words in ERRORS],
)
def test_what_does_not_fit_is_named(words: str) -> None:
    with pytest.raises(OperandError) as caught:
        ERRORS[words](*sample())
    assert words in str(caught.value)


def test_process_group_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="dist_process_group="):
        parallel_cross_entropy(*sample(), dist_process_group=object())


def test_former_name_of_the_logits_warns() -> None:
    x, target = sample()
    with pytest.warns(FutureWarning, match="now called inp"):
        loss = parallel_cross_entropy(x, target, _input=x)
    assert torch.equal(loss, parallel_cross_entropy(x, target))
