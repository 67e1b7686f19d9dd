"""Quantizers of storages of their own, multiplied by ``qgemm``, as Transformer Engine's custom
recipes define them."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from functools import partial
from typing import Any

import pytest
import torch

import fp8core
from fp8core import OperandError, RecipeError, UnsupportedError, ops, recipe
from fp8core.recipe import CustomRecipe
from tests.device import DEVICE

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclasses.dataclass
class Codes(fp8core.QuantizedTensorStorage):
    """What Transformer Engine's reference quantizers return."""

    data: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    data_t: torch.Tensor | None = None
    scale_t: torch.Tensor | None = None
    dtype: torch.dtype | None = None
    original_shape: tuple[int, ...] | None = None
    _quantizer: Any = None

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        if rowwise_usage is False:
            self.data = None
        if columnwise_usage is False:
            self.data_t = None

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], Codes]:
        tensors = [self.data, self.data_t, self.scale, self.scale_t]
        self.data = self.data_t = self.scale = self.scale_t = None
        return tensors, self

    def restore_from_saved(self, tensors: Any) -> Any:
        self.data, self.data_t, self.scale, self.scale_t = tensors[:4]
        return tensors[4:]


class Dequantizing(Codes):
    """One whose values can be read."""

    def dequantize(self, *, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        if self.data is not None:
            return (self.data.float() * self.scale).to(dtype)
        return (self.data_t.float() * self.scale_t).t().to(dtype)  # type: ignore[union-attr]


class Scaling(fp8core.Quantizer):
    """A scale from the amax, without products of its own."""

    storage: type[Codes] = Dequantizing

    def __init__(self, dtype: torch.dtype = E4M3) -> None:
        super().__init__(rowwise=True, columnwise=True)
        self.internal = True
        self.dtype = dtype
        self.calls: list[tuple[Any, ...]] = []

    @property
    def custom(self) -> bool:
        return True

    def quantize(self, tensor: torch.Tensor, **unused: Any) -> Any:
        amax = tensor.float().abs().amax().view(1) if tensor.numel() else tensor.new_ones(1).float()
        codes = (tensor.float() * (torch.finfo(self.dtype).max / amax)).to(self.dtype)
        scale = amax / torch.finfo(self.dtype).max
        return self.storage(
            data=codes if self.rowwise_usage else None,
            scale=scale,
            data_t=codes.t().contiguous() if self.columnwise_usage else None,
            scale_t=scale,
            dtype=tensor.dtype,
            original_shape=tensor.shape,
            _quantizer=self,
        )


class Multiplying(Scaling):
    """With Transformer Engine's ``qgemm``."""

    storage = Codes

    def qgemm(
        self,
        *arguments: Any,
        out: torch.Tensor | None = None,
        accumulate: bool = False,
        gemm_type: Any = None,
        qresult_x: Any = None,
        qresult_w: Any = None,
    ) -> torch.Tensor:
        qx, qw, m_params, out_dtype, sx, sw, bias = arguments
        self.calls.append((gemm_type.name, m_params, qresult_x, qresult_w))
        assert m_params.out_dtype == out_dtype
        assert out is None
        y: torch.Tensor = qx.float() @ qw.float().t() * (sx * sw)
        return (y if bias is None else y + bias).to(out_dtype)


class Factory:
    """One quantizer for each tensor."""

    def __init__(self, kind: type[Scaling] = Multiplying) -> None:
        self.made: dict[str, Scaling] = {}
        self.kind = kind

    def __call__(self, role: recipe.QuantizerRole) -> Scaling:
        name = role.tensor_type
        return self.made.setdefault(name, self.kind(E5M2 if name == "grad_output" else E4M3))


def linear(**arguments: Any) -> Any:
    torch.manual_seed(1)
    return fp8core.Linear(32, 48, device=DEVICE, **{"params_dtype": torch.bfloat16, **arguments})


def trained(layer: Any, chosen: Any, *, rows: int = 16) -> list[torch.Tensor]:
    torch.manual_seed(0)
    dtype = next(layer.parameters()).dtype
    x = torch.randn(rows, 32, dtype=dtype, device=DEVICE, requires_grad=True)
    layer.zero_grad()
    with fp8core.autocast(recipe=chosen):
        y = layer(x)
    y.backward(torch.randn_like(y))
    grads = [each.grad for each in layer.parameters() if each.grad is not None]
    assert x.grad is not None
    return [y.detach(), x.grad, *grads]


def expected(layer: Any, *, rows: int = 16) -> list[torch.Tensor]:
    """Return what three products of the quantizers give, computed here."""
    torch.manual_seed(0)
    x = torch.randn(rows, 32, dtype=layer.weight.dtype, device=DEVICE)
    q, w = (Multiplying(E4M3).quantize(each) for each in (x, layer.weight.detach()))
    bias = layer.bias.detach()
    y = (q.data.float() @ w.data.float().t() * (q.scale * w.scale) + bias).to(x.dtype)
    dy = torch.randn_like(y)
    g = Multiplying(E5M2).quantize(dy)
    dx = (g.data.float() @ w.data_t.float().t() * (g.scale * w.scale)).to(x.dtype)
    dw = (g.data_t.float() @ q.data_t.float().t() * (g.scale * q.scale)).to(x.dtype)
    return [y, dx, dw, dy.float().sum(0).to(x.dtype)]


def same(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def test_three_products_are_those_of_qgemm_bit_for_bit() -> None:
    layer, factory = linear(), Factory()
    assert same(trained(layer, CustomRecipe(factory)), expected(layer))
    calls = factory.made["input"].calls + factory.made["grad_output"].calls
    assert [call[0] for call in calls] == ["FPROP", "DGRAD", "WGRAD"]
    assert [call[1].use_split_accumulator for call in calls] == [False, True, True]
    assert all(isinstance(each, Codes) for call in calls for each in call[2:])
    assert not factory.made["weight"].calls
    assert "CustomRecipe" in repr(layer)


def test_the_first_step_of_a_model_says_that_qgemm_ran(caplog: pytest.LogCaptureFixture) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.ReLU(), torch.nn.Linear(48, 32))
    fp8core.convert(model.to(DEVICE), CustomRecipe(Factory()))
    with caplog.at_level("INFO", "fp8core"):
        model(torch.randn(16, 32, device=DEVICE)).sum().backward()
    assert "2 of 2 linear layers" in caplog.text
    assert "CustomRecipe on qgemm() of its quantizers" in caplog.text


def test_the_rowwise_codes_of_the_input_are_not_held_until_backward() -> None:
    factory = Factory()
    trained(linear(), CustomRecipe(factory))
    (fprop,) = factory.made["input"].calls
    _, wgrad = factory.made["grad_output"].calls
    assert (fprop[2].data is None, fprop[2].data_t is None) == (False, True)
    assert (wgrad[3].data is None, wgrad[3].data_t is None) == (True, False)


def test_without_qgemm_dequantized_values_are_multiplied_in_high_precision() -> None:
    layer = linear(params_dtype=torch.float32)
    y, dx, dw, _ = trained(layer, CustomRecipe(Factory(Scaling)))
    wanted = expected(layer)
    for ours, theirs in zip((y, dx, dw), wanted, strict=False):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_one_storage_beside_a_tensor_in_high_precision_is_dequantized() -> None:
    class Both(Multiplying):
        storage = Dequantizing

    def factory(role: recipe.QuantizerRole) -> Any:
        return fp8core.IdentityQuantizer() if role.tensor_type == "weight" else Both(E4M3)

    layer = linear(params_dtype=torch.float32)
    torch.manual_seed(0)
    x = torch.randn(16, 32, device=DEVICE)
    with fp8core.autocast(recipe=CustomRecipe(factory)):
        y = layer(x)
    value = Both(E4M3).quantize(x).dequantize()
    torch.testing.assert_close(y, torch.nn.functional.linear(value, layer.weight, layer.bias))


@pytest.mark.parametrize(
    "make",
    [
        lambda: fp8core.LayerNormLinear(32, 48, device=DEVICE),
        lambda: fp8core.LayerNormMLP(32, 64, device=DEVICE),
        lambda: ops.Sequential(ops.RMSNorm(32), ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32)),
        lambda: fp8core.MultiheadAttention(32, 2, 16, 0.0, bias=False, device=DEVICE),
    ],
    ids=["LayerNormLinear", "LayerNormMLP", "Sequential", "MultiheadAttention"],
)
def test_chains_compute_by_qgemm_as_under_the_recipe_of_the_same_numbers(make: Any) -> None:
    torch.manual_seed(4)
    layer = make().to(DEVICE)
    x = torch.randn(16, 2, 32, device=DEVICE)
    results = []
    for chosen in (CustomRecipe(Factory()), recipe.Float8CurrentScaling()):
        x.requires_grad_(True).grad = None
        layer.zero_grad()
        with fp8core.autocast(recipe=chosen):
            y = layer(x)
        y.square().sum().backward()
        results.append([y.detach(), x.grad, *[each.grad for each in layer.parameters()]])
    for ours, theirs in zip(*results, strict=True):
        error = (ours - theirs).norm() / theirs.norm()
        assert error < 0.02, error  # scales of one number, of which a code may round otherwise


def test_gradients_are_added_to_main_grad_delayed_and_recomputed() -> None:
    wanted = trained(linear(bias=False), CustomRecipe(Factory()))
    layer = linear(bias=False, fuse_wgrad_accumulation=True)
    layer.weight.main_grad = torch.ones(48, 32, device=DEVICE)
    trained(layer, CustomRecipe(Factory()))
    torch.testing.assert_close(layer.weight.main_grad - 1, wanted[2].float(), rtol=0.01, atol=1e-5)
    layer = linear(bias=False, delay_wgrad_compute=True)
    trained(layer, CustomRecipe(Factory()))
    layer.backward_dw()
    assert torch.equal(layer.weight.grad, wanted[2])
    layer, recomputed = linear(bias=False), []
    for call in (layer, partial(fp8core.checkpoint, layer)):
        x = torch.ones(16, 32, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        layer.zero_grad()
        with fp8core.autocast(recipe=CustomRecipe(Factory())):
            y = call(x)
        y.float().square().sum().backward()
        recomputed.append([y.detach(), x.grad, layer.weight.grad])
    assert same(*recomputed)


def test_inference_empty_rows_and_a_retained_graph() -> None:
    layer, custom = linear(), CustomRecipe(Factory())
    x = torch.randn(16, 32, dtype=torch.bfloat16, device=DEVICE)
    with fp8core.autocast(recipe=custom):
        y = layer(x)
        with torch.inference_mode():
            assert torch.equal(layer(x), y)
        assert layer(x[:0]).shape == (0, 48)
    loss = y.float().sum()
    (once,) = torch.autograd.grad(loss, layer.weight, retain_graph=True)
    assert torch.equal(torch.autograd.grad(loss, layer.weight)[0], once)


class Counting(Multiplying):
    """One that counts its casts."""

    def __init__(self, dtype: torch.dtype = E4M3) -> None:
        super().__init__(dtype)
        self.casts = 0

    def quantize(self, tensor: torch.Tensor, **unused: Any) -> Any:
        self.casts += 1
        return super().quantize(tensor)


class CountingRows(fp8core.Float8CurrentScalingQuantizer):
    """One of fp8core's tensors."""

    def __init__(self, dtype: torch.dtype = E4M3) -> None:
        super().__init__("e4m3" if dtype == E4M3 else "e5m2", None)
        self.casts = 0

    def quantize_impl(self, tensor: torch.Tensor) -> Any:
        self.casts += 1
        return super().quantize_impl(tensor)


@pytest.mark.parametrize("kind", [Counting, CountingRows])
def test_a_weight_is_kept_over_microbatches_and_in_a_scope(kind: Any) -> None:
    layer, factory = linear(bias=False), Factory(kind)
    x = torch.randn(16, 32, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)

    def step(first: bool | None, factory: Factory = factory) -> list[torch.Tensor]:
        with fp8core.autocast(recipe=CustomRecipe(factory)):
            y = layer(x, is_first_microbatch=first)
        return [y.detach(), *torch.autograd.grad(y.float().sum(), [x, layer.weight])]

    found = [step(first) for first in (True, False, False)]
    assert factory.made["weight"].casts == 1
    assert factory.made["input"].casts == 3
    assert all(same(each, step(None)) for each in found)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(OperandError, match="the weight was written since it was quantized"):
        step(False)
    doubled = step(True)
    assert not same(doubled, found[0])
    other = Factory(kind)  # whose objects quantize by themselves
    assert same(step(False, other), doubled)
    assert other.made["weight"].casts == 1
    before = factory.made["weight"].casts
    with fp8core.frozen_weights(layer), torch.no_grad():
        for _ in range(2):
            with fp8core.autocast(recipe=CustomRecipe(factory)):
                assert torch.equal(layer(x), doubled[0])
    assert factory.made["weight"].casts == before + 1


def test_a_product_may_reuse_its_memory() -> None:
    """Each product of one quantizer writes to the same buffer, of which it returns a part."""

    class Reusing(Multiplying):
        buffer = torch.empty(48 * 48, dtype=torch.bfloat16, device=DEVICE)

        def qgemm(self, *arguments: Any, **keywords: Any) -> Any:
            y = super().qgemm(*arguments, **keywords)
            result = self.buffer[: y.numel()].view(y.shape)
            return result.copy_(y)

    square = linear(), fp8core.Linear(48, 48, device=DEVICE, params_dtype=torch.bfloat16)
    steps = []
    for factory in (Factory(Reusing), Factory()):
        x = torch.ones(16, 32, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
        with fp8core.autocast(recipe=CustomRecipe(factory)):
            y = square[0](x)
            first = y.detach().clone()
            z = square[1](y)
        assert torch.equal(y, first)
        z.backward(torch.ones_like(z))
        steps.append([y.detach(), z.detach(), x.grad])
        steps[-1] += [each.grad for layer in square for each in layer.parameters()]
        for layer in square:
            layer.zero_grad()
    assert same(*steps)


class Reusing(Multiplying):
    """One that writes all its codes, scales or storages to the same place."""

    reused = "data"

    def __init__(self, dtype: torch.dtype = E4M3) -> None:
        super().__init__(dtype)
        self.buffers: dict[str, torch.Tensor] = {}
        self.before: Codes | None = None
        self.history = torch.zeros(4)

    def quantize(self, tensor: torch.Tensor, **unused: Any) -> Any:
        storage = super().quantize(tensor)
        storage.history = self.history.add_(1)  # which no product reads
        if self.reused == "storage":
            before, self.before = self.before or storage, self.before or storage
            vars(before).update(vars(storage))
            return before
        value = getattr(storage, self.reused, None)
        if value is not None:
            buffer = self.buffers.setdefault(
                self.reused, torch.empty(4096, dtype=value.dtype, device=DEVICE)
            )
            part = buffer[: value.numel()].view(value.shape)
            setattr(storage, self.reused, part.copy_(value))
        return storage


@pytest.mark.parametrize("reused", ["data_t", "scale", "scale_t", "storage", "history"])
def test_codes_that_a_later_cast_has_overwritten_are_refused(
    reused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward would read those of the second call for the first; so in each of its products."""
    monkeypatch.setattr(Reusing, "reused", reused)
    layer, chosen = linear(params_dtype=torch.float32), CustomRecipe(qfactory=Factory(Reusing))
    first, second = (torch.randn(16, 32, device=DEVICE, requires_grad=True) for _ in range(2))
    with fp8core.autocast(recipe=chosen):
        y = layer(first)
    y.sum().backward(retain_graph=True)
    with fp8core.autocast(recipe=chosen):
        later = layer(second)
    later.sum().backward(retain_graph=True)
    if reused == "history":
        y.sum().backward()
        return
    with pytest.raises(OperandError, match="reads Codes, whose tensors a later cast"):
        y.sum().backward()


class Elsewhere(fp8core.QuantizedTensorStorage):
    """One whose tensors are not in its dict."""

    def __init__(self, codes: Codes) -> None:
        self.codes, self._quantizer = (
            {"all": [codes.data, codes.data_t, codes.scale]},
            codes._quantizer,
        )

    data = property(lambda self: self.codes["all"][0])
    data_t = property(lambda self: self.codes["all"][1])
    scale = scale_t = property(lambda self: self.codes["all"][2])


class Slotted(fp8core.QuantizedTensorStorage):
    __slots__ = ("data", "data_t", "scale", "scale_t")

    def __init__(self, codes: Codes) -> None:
        for name in Slotted.__slots__:
            setattr(self, name, getattr(codes, name))
        self._quantizer = codes._quantizer


@pytest.mark.parametrize("kept", ["in slots", "in containers", "in memory of another tensor"])
def test_codes_are_refused_wherever_a_storage_has_them(kept: str) -> None:
    class Writing(Multiplying):
        buffer: Any = None

        def quantize(self, tensor: torch.Tensor, **unused: Any) -> Any:
            codes = super().quantize(tensor)
            if tensor.shape == (16, 32):
                self.buffer = torch.empty_like(codes.data_t) if self.buffer is None else self.buffer
                if kept == "in memory of another tensor":
                    self.buffer.data = codes.data_t
                else:
                    self.buffer.copy_(codes.data_t)
                codes.data_t = self.buffer
            return {"in slots": Slotted, "in containers": Elsewhere}.get(kept, lambda c: c)(codes)

    layer, chosen = linear(params_dtype=torch.float32), CustomRecipe(qfactory=Factory(Writing))
    inputs = [torch.randn(16, 32, device=DEVICE, requires_grad=True) for _ in range(2)]
    with fp8core.autocast(recipe=chosen):
        first, second = map(layer, inputs)
    second.sum().backward()
    with pytest.raises(OperandError, match="whose tensors a later cast"):
        first.sum().backward()


def test_a_cast_in_another_thread_comes_after_what_codes_were_noted() -> None:
    """Else the codes of that cast would be taken for those of the first."""
    others: list[threading.Thread] = []

    def cast_elsewhere(run: Any) -> None:
        if not others:
            others.append(threading.Thread(target=run))
            others[0].start()
            others[0].join(0.5)

    class Waiting(Codes):
        def update_usage(self, **usages: Any) -> None:
            cast_elsewhere(lambda: forward(2))
            super().update_usage(**usages)

    class Writing(Reusing):
        storage = Waiting
        reused = "data_t"

    layer, chosen = linear(params_dtype=torch.float32), CustomRecipe(qfactory=Factory(Writing))

    def forward(scale: float) -> torch.Tensor:
        with fp8core.autocast(recipe=chosen):
            return layer(scale * torch.randn(16, 32, device=DEVICE))  # type: ignore[no-any-return]

    y = forward(1)
    others[0].join()
    with pytest.raises(OperandError, match="whose tensors a later cast"):
        y.sum().backward()


def test_a_quantizer_may_run_layers_of_its_own() -> None:
    inner, results = linear(), []

    class Running(Multiplying):
        def quantize(self, tensor: torch.Tensor, **unused: Any) -> Any:
            if tensor.shape == (16, 32):
                with fp8core.autocast(recipe=CustomRecipe(Factory())):
                    inner(tensor)
            return super().quantize(tensor)

    def train() -> None:
        results.extend(trained(linear(), CustomRecipe(Factory(Running))))

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    assert same(results, trained(linear(), CustomRecipe(Factory())))


def test_a_storage_that_is_returned_again_as_it_is_is_read() -> None:
    class Caching(Multiplying):
        before: Any = None

        def quantize(self, tensor: torch.Tensor, **unused: Any) -> Any:
            if self.dtype == E4M3 and tensor.shape == (48, 32):  # the weight
                self.before = self.before or super().quantize(tensor)
                return self.before
            return super().quantize(tensor)

    layer, chosen = linear(params_dtype=torch.float32), CustomRecipe(qfactory=Factory(Caching))
    inputs = [torch.randn(16, 32, device=DEVICE, requires_grad=True) for _ in range(2)]
    with fp8core.autocast(recipe=chosen):
        results = [layer(x) for x in inputs]
    for y in results:
        y.sum().backward()


def test_threads_share_a_quantizer() -> None:
    layer, factory = linear(), Factory()
    x = torch.randn(16, 32, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    results: list[torch.Tensor] = []

    def work() -> None:
        for _ in range(5):
            with fp8core.autocast(recipe=CustomRecipe(factory)):
                y = layer(x)
            results.append(torch.autograd.grad(y.float().sum(), x)[0])

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(results) == 20
    assert all(torch.equal(each, results[0]) for each in results)


def test_quantizers_without_the_attribute_are_known_by_what_they_make() -> None:
    class Making(Multiplying):
        custom = False  # type: ignore[assignment]  # as of a class without it

        def make_empty(self, shape: Any, **unused: Any) -> Codes:
            return Codes(original_shape=tuple(shape), _quantizer=self)

    layer = linear()
    assert same(trained(layer, CustomRecipe(Factory(Making))), expected(layer))
    assert Making().plan == (None, None)


def test_a_subclass_of_a_subclass_without_update_usage() -> None:
    class Bare(fp8core.QuantizedTensorStorage):
        def __init__(self, **parts: Any) -> None:
            self.__dict__.update(parts)

    class Derived(Multiplying):
        storage = type("Own", (Bare,), {})

    layer = linear()
    assert same(trained(layer, CustomRecipe(Factory(Derived))), expected(layer))


# --- the class


def test_a_quantized_tensor_is_a_storage_too() -> None:
    stored = fp8core.MXFP8Quantizer("e4m3")(torch.ones(32, 32))
    assert isinstance(stored, fp8core.QuantizedTensorStorage)
    assert isinstance(Codes(), fp8core.QuantizedTensorStorage)
    assert not isinstance(Codes(), fp8core.QuantizedTensor)
    for same_tensor in (copy.deepcopy(stored), pickle.loads(pickle.dumps(stored))):
        assert isinstance(same_tensor, fp8core.QuantizedTensorStorage)


def test_what_a_storage_does_not_implement_is_named() -> None:
    bare = fp8core.QuantizedTensorStorage()
    for call in (
        bare.update_usage,
        bare.get_usages,
        bare.prepare_for_saving,
        lambda: bare.restore_from_saved([]),
    ):
        with pytest.raises(NotImplementedError, match="QuantizedTensorStorage does not implement"):
            call()
    with pytest.raises(OperandError, match="has no quantizer"):
        bare._get_quantizer()


def test_a_storage_is_written_by_its_quantizer() -> None:
    class Writing(Multiplying):
        def update_quantized(self, src: Any, dst: Any, *, noop_flag: Any = None) -> Any:
            dst.__dict__.update(self.quantize(src).__dict__)
            return dst

    quantizer = Writing()
    storage = quantizer(torch.ones(4, 4))
    assert storage.quantize_(torch.full((4, 4), 2.0)) is storage
    assert torch.equal(storage.scale, quantizer(torch.full((4, 4), 2.0)).scale)
    assert storage._get_quantizer() is quantizer


class _Saving(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        storage = Scaling()(x.detach())
        tensors, ctx.tensor_objects = fp8core.prepare_for_saving(x, storage, None)
        assert storage.data is None
        ctx.save_for_backward(*tensors)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, storage, none = fp8core.restore_from_func_ctx(ctx)
        assert none is None
        return grad * storage.dequantize() + x


def test_storages_are_taken_apart_and_restored_for_backward() -> None:
    x = torch.randn(8, 8, requires_grad=True)
    _Saving.apply(x).sum().backward()  # type: ignore[no-untyped-call]
    assert torch.equal(x.grad, Scaling()(x.detach()).dequantize() + x.detach())
    tensors, objects = fp8core.prepare_for_saving(Scaling()(x.detach()), x)
    restored, left = fp8core.restore_from_saved(objects, [*tensors, x], True)
    assert [type(each) for each in restored] == [Dequantizing, torch.Tensor]
    assert left[0] is x
    with pytest.raises(OperandError, match="saved tensors for 2"):
        fp8core.restore_from_saved([None, None], [x])


# --- what is refused


def refused(chosen: Any, error: type[Exception], *texts: str, layer: Any = None) -> None:
    with pytest.raises(error) as raised:
        trained(linear() if layer is None else layer, chosen)
    for text in texts:
        assert text in str(raised.value)


def test_a_storage_beside_an_operand_of_ours_is_refused_when_the_layer_is_bound() -> None:
    def factory(role: recipe.QuantizerRole) -> Any:
        name = role.tensor_type
        return Multiplying() if name == "input" else fp8core.MXFP8Quantizer("e4m3")

    texts = ("storages of their own for input", "for weight, grad_output", "IdentityQuantizer()")
    refused(CustomRecipe(factory), RecipeError, *texts)


def returning(result: Any) -> CustomRecipe:
    class Other(Multiplying):
        def qgemm(self, *arguments: Any, **keywords: Any) -> Any:
            return result(super().qgemm(*arguments, **keywords))

    return CustomRecipe(Factory(Other))


def test_what_qgemm_returns_is_checked() -> None:
    refused(returning(lambda y: None), OperandError, "Other.qgemm returned NoneType")
    refused(returning(lambda y: y.float()), OperandError, "fprop", "torch.float32 [16, 48]")
    refused(
        returning(lambda y: y.t()), OperandError, "[48, 16]", "expected torch.bfloat16 [16, 48]"
    )


def test_storages_that_nothing_reads_are_refused() -> None:
    class Blind(Scaling):
        storage = Codes

    texts = ("fprop: Codes has no dequantize(dtype=)", "qgemm()")
    refused(CustomRecipe(Factory(Blind)), OperandError, *texts)

    class RowsAlone(Multiplying):
        def quantize(self, tensor: torch.Tensor, **unused: Any) -> Any:
            storage = super().quantize(tensor)
            storage.data_t = None
            return storage

    texts = ("dgrad by qgemm() reads data_t of Codes", "columnwise_usage")
    refused(CustomRecipe(Factory(RowsAlone)), OperandError, *texts)

    class Plain(Multiplying):
        def quantize(self, tensor: torch.Tensor, **unused: Any) -> Any:
            return tensor

    texts = ("returned Tensor, no QuantizedTensorStorage of its own",)
    refused(CustomRecipe(Factory(Plain)), OperandError, *texts)

    class Ours(Multiplying):
        def quantize(self, tensor: torch.Tensor, **unused: Any) -> Any:
            return fp8core.Float8CurrentScalingQuantizer("e4m3", None)(tensor)

    refused(CustomRecipe(Factory(Ours)), OperandError, "no QuantizedTensorStorage of its own")


def test_a_quantizer_that_forgets_to_quantize_is_not_one_of_high_precision() -> None:
    class Forgetful(Multiplying):
        quantize = fp8core.Quantizer.quantize  # type: ignore[assignment]  # the base's

    refused(CustomRecipe(Factory(Forgetful)), OperandError, "neither orientation")


@pytest.mark.parametrize("kind", [Multiplying, CountingRows])
def test_what_would_go_by_the_plan_alone_asks_for_the_object(kind: Any) -> None:
    """Whose code it would leave out without a word."""
    custom = CustomRecipe(Factory(kind))
    with pytest.raises(RecipeError, match=f"{kind.__name__}, an object .* Call the object"):
        fp8core.functional.quantize(torch.ones(32, 32, device=DEVICE), custom)
    model = torch.nn.Sequential(linear())
    with pytest.raises(UnsupportedError, match=f"gather of a weight that {kind.__name__}, an"):
        fp8core.distributed.gather_quantized(model, custom)
    with pytest.raises(OperandError, match="an object of the user quantizes it"):
        fp8core.quantize_(model.eval(), custom)


def test_a_weight_alone_in_a_storage_is_refused_by_name() -> None:
    """Nothing would quantize it, and the product be in high precision without a word."""
    refused(recipe.WeightOnly(CustomRecipe(Factory())), RecipeError, "WeightOnly: the weight")


def test_groups_graphs_stored_weights_and_the_monitor_are_refused_by_name() -> None:
    custom = CustomRecipe(Factory())
    grouped = fp8core.GroupedLinear(2, 32, 32, device=DEVICE)
    with pytest.raises(UnsupportedError, match="of groups"), fp8core.autocast(recipe=custom):
        grouped(torch.randn(32, 32, device=DEVICE), [16, 16])
    compiled = torch.compile(linear(), backend="eager")
    with pytest.raises(UnsupportedError, match="code of its own"), fp8core.autocast(recipe=custom):
        compiled(torch.randn(16, 32, dtype=torch.bfloat16, device=DEVICE))
    with fp8core.quantized_model_init(recipe="current"):
        stored = linear()
    refused(custom, OperandError, "stored quantized already", layer=stored)
    layer = linear()
    with fp8core.monitor(torch.nn.Sequential(layer)):
        refused(custom, UnsupportedError, "storages of the user's own", layer=layer)


def test_an_operator_of_torch_does_not_read_a_storage() -> None:
    layer = linear()
    x = torch.randn(16, 32, dtype=torch.bfloat16, device=DEVICE)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + 0

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        fp8core.autocast(recipe=CustomRecipe(Factory())),
        pytest.raises(OperandError, match=r"aten.add reads Codes.*save_on_cpu"),
    ):
        layer(x)


def test_offloading_leaves_storages_where_they_are() -> None:
    layer, custom = linear(), CustomRecipe(Factory())
    wanted = trained(layer, custom)
    torch.manual_seed(0)
    x = torch.randn(16, 32, dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    context, synchronize = fp8core.get_cpu_offload_context(True, 1, 2)
    with context, fp8core.autocast(recipe=custom):
        y = layer(x)
    y = synchronize(y)
    y.backward(torch.randn_like(y))
    assert torch.equal(x.grad, wanted[1])


def test_a_stored_weight_is_refused_where_an_object_quantizes_it() -> None:
    """Which would be written by the format alone, without the object's code."""

    class Clamped(fp8core.Float8CurrentScalingQuantizer):
        def quantize_impl(self, tensor: torch.Tensor) -> Any:
            return super().quantize_impl(tensor.clamp(-0.01, 0.01))

    class ClampedRows(fp8core.HybridQuantizer):
        def quantize(self, tensor: torch.Tensor, **others: Any) -> Any:
            return super().quantize(tensor.clamp(-0.01, 0.01), **others)

    rows, columns = fp8core.MXFP8Quantizer("e5m2"), fp8core.MXFP8Quantizer("e4m3")
    by_rows, with_code = (
        kind(
            rowwise_quantizer=rows,
            columnwise_quantizer=columns,
            columnwise_source="rowwise_dequantized",
        )
        for kind in (fp8core.HybridQuantizer, ClampedRows)
    )

    def chosen(weight: Any) -> CustomRecipe:
        others = fp8core.IdentityQuantizer() if isinstance(weight, Multiplying) else columns
        return CustomRecipe(lambda role: weight if role.tensor_type == "weight" else others)

    for maker in (Clamped("e4m3", None), with_code, Multiplying()):
        with (
            pytest.raises(UnsupportedError, match=f"{type(maker).__name__}, an object"),
            fp8core.quantized_model_init(recipe=chosen(maker)),
        ):
            fp8core.Linear(64, 64)
    for maker in (columns, by_rows):
        with fp8core.quantized_model_init(recipe=chosen(maker)):
            assert isinstance(fp8core.Linear(64, 64).weight, fp8core.QuantizedTensor)
