"""Layers of FakeTensorMode: no kernel is given a tensor of it, and what is real stays as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fp8core
from fp8core import recipe
from fp8core.backend_api import FusedDesc, OpDesc, Operand
from fp8core.dispatch import policy
from fp8core.errors import OperandError
from fp8core.training.optimizers import FusedSGD
from tests.dispatch import toys

BF16 = torch.bfloat16
X = torch.linspace(-1, 1, 32 * 64).to(BF16).view(32, 64)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple | list | Operand):
        for each in value:
            yield from _tensors(each)


def _reading_memory(backend: Any, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
    """Bind ``desc`` to what refuses tensors that have no memory, as those of a fake mode."""
    run = backend._reference.bind(desc, device)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        for tensor in _tensors([*args, *kwargs.values()]):
            assert type(tensor) in (torch.Tensor, nn.Parameter), desc
        return run(*args, **kwargs)

    return kernel


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    """A backend whose functions read memory: none gets a fake tensor."""

    def refuse(desc: OpDesc) -> str | None:
        return "no such kernel" if isinstance(desc, FusedDesc) else None

    with toys.isolation():
        toys.register(toys.backend("kernels", refuse=refuse, bind=_reading_memory, priority=50))
        yield


def _linear() -> fp8core.Linear:
    torch.manual_seed(0)
    return fp8core.Linear(64, 128, params_dtype=BF16)


def _step(layer: nn.Module, x: torch.Tensor, name: str, **kwargs: Any) -> list[torch.Tensor]:
    """Return the output of a training step, and the gradients, which are taken away."""
    x = x.detach().requires_grad_()
    with fp8core.autocast(recipe=recipe.by_name(name)):
        y = layer(x, **kwargs)
    y.float().square().sum().backward()
    assert x.grad is not None
    parameters = list(layer.parameters())
    results = [y, x.grad, *[p.grad for p in parameters if p.grad is not None]]
    for parameter in parameters:
        parameter.grad = None
    return results


@pytest.mark.parametrize("has_grad", [True, False])
@pytest.mark.parametrize("starts_fake", [True, False])
@pytest.mark.parametrize("name", ["delayed", "current"])
def test_a_real_layer_computes_as_before_after_calls_of_several_fake_modes(
    name: str, starts_fake: bool, has_grad: bool
) -> None:
    """Delayed scales that such a call made were fake ones of that mode for good."""
    layer, other = _linear(), _linear()
    for step in range(4):
        if (step % 2 == 0) is starts_fake:
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                fake = mode.from_tensor(X)
                if has_grad:
                    assert {*map(type, _step(layer, fake, name))} == {FakeTensor}
                else:
                    with torch.no_grad(), fp8core.autocast(recipe=recipe.by_name(name)):
                        assert type(layer(fake)) is FakeTensor
        x = X * 2.0**step
        for got, wanted in zip(_step(layer, x, name), _step(other, x, name), strict=True):
            assert torch.equal(got, wanted)
    state = other.state_dict()
    for key, value in layer.state_dict().items():
        assert type(value) is torch.Tensor
        assert torch.equal(value, state[key]), key


@pytest.mark.parametrize("order", ["fake, real", "real, fake"])
@pytest.mark.parametrize("has_run", [True, False])
def test_scales_follow_the_real_one_of_calls_in_one_autocast(has_run: bool, order: str) -> None:
    """The update of a fake call stood for that of both, so that the scales stayed."""
    layer, other, delayed = _linear(), _linear(), recipe.DelayedScaling()
    if has_run:
        _step(layer, X, "delayed")
        _step(other, X, "delayed")
    with fp8core.autocast(recipe=delayed):
        for kind in order.split(", "):
            if kind == "real":
                got = layer(X)
                continue
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                layer(mode.from_tensor(X))
            with FakeTensorMode() as mode:
                _linear()(mode.from_tensor(X))
    with fp8core.autocast(recipe=delayed):
        assert torch.equal(other(X), got)
    state = other.state_dict()
    for key, value in layer.state_dict().items():
        assert torch.equal(value, state[key]), key


@pytest.mark.parametrize("has_run", [True, False])
@pytest.mark.parametrize("name", ["delayed", "block"])
def test_a_functional_call_of_fake_parameters_leaves_nothing_behind(
    name: str, has_run: bool
) -> None:
    layer, other = _linear(), _linear()
    for step in range(2):
        if has_run or step:
            for got, wanted in zip(_step(layer, X, name), _step(other, X, name), strict=True):
                assert torch.equal(got, wanted)
        with FakeTensorMode() as mode:
            stored = {**dict(layer.named_parameters()), **dict(layer.named_buffers())}
            fakes = {key: mode.from_tensor(value) for key, value in stored.items()}
            with fp8core.autocast(recipe=recipe.by_name(name)):
                y = torch.func.functional_call(layer, fakes, (mode.from_tensor(X),))
            y.sum().backward()


def test_fake_models_under_delayed_scaling_are_evaluated_recomputed_and_calibrated() -> None:
    """All of that reads what the buffers say of themselves, which fake ones do not."""
    delayed = recipe.DelayedScaling()
    with FakeTensorMode() as mode:
        x = mode.from_tensor(X)
        model = nn.Sequential(nn.Linear(64, 64, dtype=BF16), nn.ReLU()).train()
        fp8core.convert(model, delayed)
        model(x).sum().backward()
        assert type(model.eval()(x)) is FakeTensor
        layer = _linear()
        with fp8core.autocast(recipe=delayed):
            fp8core.checkpoint(layer, x, use_reentrant=False).sum().backward()
        with fp8core.autocast(enabled=False, calibrating=True, recipe=delayed):
            layer(x)
        with torch.no_grad(), fp8core.autocast(recipe=delayed):
            assert type(layer(x)) is FakeTensor


@pytest.mark.parametrize("name", ["current", "mxfp8"])
def test_fake_masters_and_optimizers_step(name: str) -> None:
    chosen = recipe.by_name(name)
    with FakeTensorMode() as mode:
        with fp8core.quantized_model_init(recipe=chosen, preserve_high_precision_init_val=True):
            layer = _linear()
        masters = fp8core.MasterWeights(layer)
        optimizer = torch.optim.AdamW(masters.parameters())
        masters.attach(optimizer)
        norm = fp8core.RMSNorm(64, dtype=BF16)
        of_norm = FusedSGD(norm.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            with fp8core.autocast(recipe=chosen):
                layer(norm(mode.from_tensor(X))).sum().backward()
            optimizer.step()
            of_norm.step()
        layer.load_state_dict(layer.state_dict())


def test_what_counts_nan_and_inf_counts_none_of_fake_tensors() -> None:
    layer = _linear()
    fp8core.clear_found_inf(layer)
    with fp8core.quantized_model_init(recipe=recipe.Float8CurrentScaling()):
        _linear()  # whose casts have a counter of their device
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        _step(layer, mode.from_tensor(X), "current")
    with FakeTensorMode() as mode:
        fake = _linear()
        fp8core.clear_found_inf(fake)
        _step(fake, mode.from_tensor(X), "current")
        with fp8core.quantized_model_init(recipe=recipe.Float8CurrentScaling()):
            _linear()  # whose weights count as well where anybody has asked
        of_fake = fp8core.found_inf(fake)  # a real tensor
    assert not of_fake
    assert not fp8core.found_inf(layer)
    _step(layer, X * torch.inf, "current")
    assert fp8core.found_inf(layer)


@pytest.mark.parametrize(
    "make",
    [
        _linear,
        lambda: fp8core.RMSNorm(64, dtype=BF16),
        lambda: fp8core.LayerNormMLP(64, 64, params_dtype=BF16),
        lambda: fp8core.ops.Sequential(fp8core.ops.GELU()),
        lambda: fp8core.DotProductAttention(4, 16),
    ],
    ids=["linear", "norm", "mlp", "activation", "attention"],
)
def test_fake_tensors_outside_of_their_mode_are_refused(make: Callable[[], nn.Module]) -> None:
    with FakeTensorMode() as mode:
        layer, x = make(), mode.from_tensor(X)
        if isinstance(layer, fp8core.DotProductAttention):
            layer, x = nn.Sequential(_Attending(layer)), x.view(16, 2, 4, 16)
        assert type(layer(x)) is FakeTensor
    with pytest.raises(
        OperandError, match=r"FakeTensor outside of its mode.*with tensor.fake_mode"
    ):
        layer(x)
    for parameter in layer.parameters():  # which alone are fake
        with pytest.raises((OperandError, AssertionError), match=r"FakeTensor"):
            layer(torch.zeros(32, 64, dtype=BF16, device=parameter.device))


class _Attending(nn.Module):
    def __init__(self, attention: fp8core.DotProductAttention) -> None:
        super().__init__()
        self.attention = attention

    def forward(self, x: torch.Tensor) -> Any:
        return self.attention(x, x, x)


def test_fake_operands_are_written_by_operators_outside_of_their_mode() -> None:
    with FakeTensorMode():
        with fp8core.quantized_model_init(recipe=recipe.Float8CurrentScaling()):
            layer = _linear()
        x = torch.ones(32, 64, dtype=BF16)
        with fp8core.autocast(recipe=recipe.Float8CurrentScaling()):
            y = layer(x)
    y.sum().backward()  # of operators, as forward was
    with torch.no_grad():
        layer.weight.mul_(0.5)


def test_backends_left_out_within_a_fake_mode_are_left_out_of_real_calls_alone() -> None:
    """The mode that is active decides, not that in which the context was entered."""
    with contextlib.ExitStack() as outer:
        with FakeTensorMode():
            outer.enter_context(policy.leaving_out("reference", "gemm", because="a test"))
            assert policy.current().faked_in is not None
        assert policy.current() == policy.chosen() != policy.NO_POLICY
        layer = _linear()
        wanted = _step(layer, X, "current")
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            assert {*map(type, _step(layer, mode.from_tensor(X), "current"))} == {FakeTensor}
        for got, expected in zip(_step(layer, X, "current"), wanted, strict=True):
            assert torch.equal(got, expected)


@pytest.mark.parametrize("options", [{}, {"is_paged": True, "page_size": 16, "total_num_pages": 4}])
def test_caches_of_fake_tensors_take_steps(options: dict[str, Any]) -> None:
    with FakeTensorMode():
        layer = fp8core.MultiheadAttention(
            *(64, 4), params_dtype=BF16, attn_mask_type="padding_causal", qkv_format="bshd"
        )
        layer.layer_number = layer.core_attention.layer_number = 1
        cache = fp8core.InferenceParams(2, 32, 4, 16, BF16, **options)
        cache.allocate_memory(1)
        for step in ({0: 3, 1: 2}, {0: 1, 1: 1}):
            cache.pre_step(step)
            x = torch.ones(2, max(step.values()), 64, dtype=BF16)
            with torch.no_grad():
                y = layer(x, inference_params=cache)
            assert (type(y), y.shape) == (FakeTensor, x.shape)


@pytest.mark.parametrize("is_real", [True, False])
@pytest.mark.parametrize("name", ["current", "delayed", None])
def test_backward_of_a_real_forward_reaches_no_kernel(name: str | None, is_real: bool) -> None:
    layer, x = _linear(), X.clone().requires_grad_()
    quantizing = fp8core.autocast(recipe=name) if name else contextlib.nullcontext()
    with quantizing:
        y = layer(x)
    grad = torch.ones(y.shape, dtype=y.dtype)
    with FakeTensorMode():
        y.backward(grad if is_real else torch.empty(y.shape, dtype=y.dtype))
    for tensor in (x, *layer.parameters()):
        assert isinstance(tensor.grad, FakeTensor)
        assert (tensor.grad.shape, tensor.grad.dtype) == (tensor.shape, tensor.dtype)
        tensor.grad = None
    with fp8core.autocast(recipe=name) if name else contextlib.nullcontext():
        layer(x).sum().backward()
    assert type(x.grad) is torch.Tensor
