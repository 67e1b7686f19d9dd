"""Converted linears of one input that are called one by one: the first casts it for all."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo import compiled_autograd
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import fp8core
from fp8core import recipe
from fp8core.chain.linear.shared_input import SharedInput
from fp8core.modules.siblings import Siblings
from tests import recording_backend
from tests.device import DEVICE

RECIPES = ("delayed", "current", "rowwise", "block", "mxfp8")
WIDTH = 32


class Attention(nn.Module):
    """Three linears of one input and one of another, called as ``order`` says."""

    __module__ = "transformers.models"  # whose linears alone share an input

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=i < 2) for i in range(4))
        self.order = "qkv"
        self.between: Callable[[torch.Tensor], object] = len

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(x)
        for name in self.order:
            total = total + getattr(self, name)(x)
            self.between(x)
        y: torch.Tensor = self.o(total)
        return y


def attention(name: str = "current", *, shares: bool = True) -> Any:
    torch.manual_seed(0)
    model = Attention()
    fp8core.convert(model, name)
    if not shares:
        model._fp8core_conversion.siblings = None  # type: ignore[union-attr]
    return model


def rows(seed: int) -> torch.Tensor:
    return torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(seed))


def step(model: Any, seed: int) -> list[torch.Tensor]:
    """Take a step on a tensor that only the model has, and return all that came of it."""
    leaf = rows(seed).to(model.o.weight.dtype).requires_grad_()
    y = model(leaf * 2)
    y.square().mean().backward()
    results = [y.detach(), leaf.grad]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                results.append(parameter.grad)
                parameter.sub_(parameter.grad, alpha=0.1)
            parameter.grad = None
    return [*results, *(buffer.clone() for buffer in model.buffers())]  # type: ignore[list-item]  # a gradient is there


def are_equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(map(torch.equal, first, second))


@contextmanager
def counting(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """Yield a list to which each reader adds whether it got what the first has cast."""
    got: list[bool] = []
    take = SharedInput.take

    def noting(self: SharedInput, x: torch.Tensor, *, columnwise: bool) -> Any:
        codes = take(self, x, columnwise=columnwise)
        got.append(codes is not None)
        return codes

    with monkeypatch.context() as patched:
        patched.setattr(SharedInput, "take", noting)
        yield got


def held(run: Callable[[], torch.Tensor], leave_out: Any) -> tuple[int, torch.Tensor]:
    """Return the bytes that autograd saves in ``run``, without those of parameters, and what it
    returns."""
    sizes: dict[int, int] = {}
    kept: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        sizes[storage.data_ptr()] = storage.nbytes()
        kept.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        result = run()
    for parameter in leave_out.parameters():
        sizes.pop(parameter.untyped_storage().data_ptr(), None)
    return sum(sizes.values()), result


@pytest.mark.parametrize("name", RECIPES)
def test_siblings_have_the_bits_of_linears_that_cast_alone(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = attention(name), attention(name, shares=False)
    with counting(monkeypatch) as got:
        for seed in range(5):
            assert are_equal(step(ours, seed), step(theirs, seed))
    assert got == [True] * (2 * 4)  # the first step finds them


class Foreign(Attention):
    """Code of a user."""

    __module__ = __name__


def test_code_of_users_may_write_uncounted_between_linears() -> None:
    results = []
    for kind in (Foreign, Attention):
        torch.manual_seed(0)
        model: Any = kind()
        fp8core.convert(model, "current")
        if kind is Attention:
            assert model.q.siblings is not None
            model._fp8core_conversion.siblings = None
        assert model.q.siblings is None
        with torch.no_grad():
            for seed in range(4):
                model(rows(seed) * 2)
            model.between = lambda x: x.data.mul_(2)  # as a kernel that torch knows nothing of
            results.append(model(rows(7) * 2))
    assert torch.equal(*results)


@pytest.mark.parametrize("name", RECIPES)
def test_their_programs_are_recorded_and_repeated(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recording_backend.install(monkeypatch)
    # In float32 a bias is added by an operator of torch, which no recorder of a device repeats.
    models = attention(name), attention(name, shares=False)
    ours, theirs = (model.to(torch.bfloat16) for model in models)
    is_cpu = DEVICE.type == "cpu"  # a GPU's backend records by itself
    with fp8core.use_backend(recording_backend.NAME) if is_cpu else nullcontext():
        for seed in range(7):
            assert are_equal(step(ours, seed), step(theirs, seed))
    for layer in (ours.q, ours.k, ours.v):
        (program,) = layer._bindings.memo.run.args[0]._programs.values()
        assert program._part.is_recorded == (True, False)
        assert program._inner.is_recorded == (False, True)


def t5(**sizes: int) -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        **{
            "vocab_size": 64,
            "d_model": 64,
            "d_kv": 16,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
        },
        **{"dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0, **sizes},
    )
    return transformers.T5ForConditionalGeneration(config).train()


@pytest.mark.parametrize("name", ["delayed", "current", "mxfp8"])
def test_t5_holds_an_input_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each self-attention once for three linears, and the states of the encoder once for the
    keys and values of all layers of the decoder."""
    source, target = torch.arange(64).view(2, 32), torch.arange(32).view(2, 16)
    bytes_of, results = [], []
    for shares in (True, False):
        model = t5()
        fp8core.convert(model, name)
        with monkeypatch.context() as patched, counting(monkeypatch) as got:
            if not shares:
                patched.setattr(Siblings, "note", lambda *arguments: None)
            for _ in range(3):
                run = lambda: model(input_ids=source, decoder_input_ids=target).logits  # noqa: B023, E731
                size, logits = held(run, model)
                logits.square().mean().backward()
            grads = [each.grad for each in model.parameters() if each.grad is not None]
            results.append([logits.detach(), *grads, *model.buffers()])
        bytes_of.append(size)
        assert got == ([True] * (2 * (2 * (2 + 2) + 3)) if shares else [])
    assert are_equal(*results)
    codes = 64 * (2 * 32 * (2 * 2 + 3) + 2 * 16 * 2 * 2)
    assert bytes_of[1] - bytes_of[0] >= codes
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            model.generate(source, max_new_tokens=3, use_cache=True)


def write(x: torch.Tensor) -> None:
    with torch.no_grad():
        x.mul_(1.5)


BETWEEN: dict[str, tuple[str, Callable[[torch.Tensor], object]]] = {
    "a write": ("qkv", write),
    "another order": ("vkq", len),
    "one called twice": ("qkkv", len),
    "the first called twice": ("qqkv", len),
    "one left out": ("qv", len),
    "the first left out": ("kv", len),
}


@pytest.mark.parametrize("name", ["delayed", "current"])
@pytest.mark.parametrize("case", BETWEEN)
def test_nothing_stale_is_read(case: str, name: str) -> None:
    ours, theirs = attention(name), attention(name, shares=False)
    for seed in range(12):
        for model in (ours, theirs):
            is_odd = seed in (3, 4, 8)
            model.order, model.between = BETWEEN[case] if is_odd else ("qkv", len)
        assert are_equal(step(ours, seed), step(theirs, seed)), seed


CALLS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "no gradients": lambda m, x: _under(torch.no_grad(), m, x),
    "inference mode": lambda m, x: _under(torch.inference_mode(), m, x),
    "another recipe": lambda m, x: _under(
        fp8core.autocast(recipe=recipe.MXFP8BlockScaling()), m, x
    ),
    "high precision": lambda m, x: _under(fp8core.autocast(enabled=False), m, x),
    "calibration": lambda m, x: _under(
        fp8core.autocast(enabled=False, calibrating=True, recipe=recipe.DelayedScaling()), m, x
    ),
    "torch's autocast": lambda m, x: _under(torch.autocast("cpu", torch.bfloat16), m, x),
    "a checkpoint": lambda m, x: checkpoint(m, x, use_reentrant=False),  # type: ignore[no-any-return]
    "a checkpoint of the library": lambda m, x: fp8core.checkpoint(m, x),
    "a view": lambda m, x: m(x.view(-1, WIDTH)).view_as(x),
    "a part": lambda m, x: m(x[:, :4]),
    "a subclass": lambda m, x: m(x.as_subclass(Subclass)).as_subclass(torch.Tensor),
}


REFUSED = ("a checkpoint", "delayed")


class Subclass(torch.Tensor):
    pass


def _under(mode: Any, model: Any, x: torch.Tensor) -> torch.Tensor:
    with mode:
        y: torch.Tensor = model(x)
    return y


@pytest.mark.parametrize(
    ("case", "name"),
    # A backward pass over two forwards of the model refuses to repeat one of delayed scaling.
    [pair for pair in itertools.product(CALLS, ("current", "delayed")) if pair != REFUSED],
)
def test_other_calls_of_the_same_tensor_compute_what_they_did(case: str, name: str) -> None:
    ours, theirs = attention(name), attention(name, shares=False)
    for seed in range(8):
        results = []
        for model in (ours, theirs):
            leaf = rows(seed).requires_grad_()
            x = leaf * 2
            ys = [model(x), CALLS[case](model, x), model(x)]
            sum(y.float().square().sum() for y in ys if not y.is_inference()).backward()  # type: ignore[union-attr]
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            results.append([*ys, leaf.grad, *grads, *map(torch.clone, model.buffers())])
        assert are_equal(*results), seed  # type: ignore[arg-type]


def test_layers_that_are_steps_of_their_own_keep_their_scales() -> None:
    """Called past the model, each linear's scales move on before the next linear is called."""
    ours, theirs = attention("delayed"), attention("delayed", shares=False)
    for seed in range(8):
        results = []
        for model in (ours, theirs):
            if seed < 4:
                results.append(step(model, seed))
                continue
            y = model.forward(rows(seed).requires_grad_() * 2)
            y.sum().backward()
            results.append([y, *map(torch.clone, model.buffers())])
        assert are_equal(*results), seed


def test_a_hook_sees_its_call_and_may_change_the_input() -> None:
    ours, theirs = attention(), attention(shares=False)
    seen: list[torch.Tensor] = []
    for seed in range(6):
        if seed == 3:
            for model in (ours, theirs):
                model.k.register_forward_pre_hook(lambda module, given: (given[0] * 3,))
                model.v.register_forward_hook(lambda module, given, y: seen.append(y))
        assert are_equal(step(ours, seed), step(theirs, seed))
        assert len(seen) == 2 * max(seed - 2, 0)


def test_scales_that_differ_are_each_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = attention("delayed"), attention("delayed", shares=False)
    x = rows(9) * 100
    with counting(monkeypatch) as got:
        for seed in range(8):
            assert are_equal(step(ours, seed), step(theirs, seed))
            if seed == 3:
                for model in (ours, theirs):
                    model.k(x).sum().backward()
                    assert model.k.scale_fwd[0] != model.q.scale_fwd[0]
                    model.zero_grad()
    assert got[:6] == [True] * 6
    assert not all(got)


def remains() -> int:
    gc.collect()
    return sum(type(each).__name__ == "_Codes" for each in gc.get_objects())


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_nothing_is_kept_after_a_forward(name: str) -> None:
    model, x = attention(name), rows(0)
    for _ in range(4):
        model(x)  # a tensor that lives on
        assert remains() == 0
    with torch.no_grad():
        for _ in range(3):
            model(x)
            assert remains() == 0
    step(model, 1)
    step(model, 2)
    assert remains() == 0
    assert not model._fp8core_conversion.siblings._firsts.keys() - {(id(x), x.data_ptr())}


def test_a_forward_that_fails_leaves_nothing_behind() -> None:
    model = attention()
    for seed in range(3):
        step(model, seed)

    def fail(x: torch.Tensor) -> None:
        raise ZeroDivisionError

    model.between = fail
    with pytest.raises(ZeroDivisionError):
        step(model, 3)
    assert remains() == 0
    model.between = len
    theirs = attention(shares=False)
    for seed in range(3):
        step(theirs, seed)
    assert are_equal(step(model, 4), step(theirs, 4))


def test_what_is_not_read_goes_with_its_tensor_and_is_soon_put_no_more() -> None:
    model = attention()
    for seed in range(3):
        step(model, seed)
    model.order = "q"
    leaf = rows(3).requires_grad_()
    x = leaf * 2
    model(x)
    assert remains() == 1
    del x
    assert remains() == 0
    x = leaf * 2
    for _ in range(5):
        model(x)
    assert remains() == 0


def test_copies_and_moved_layers_find_their_own_siblings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.models, "Attention", Attention, raising=False)  # for pickle
    model = attention()
    for seed in range(2):
        step(model, seed)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert other._fp8core_conversion.siblings is not model._fp8core_conversion.siblings
        with counting(monkeypatch) as got:
            step(other, 2)
            step(other, 3)
        assert got == [True] * 2
    model.k.to(torch.float64).to(torch.float32)
    with counting(monkeypatch) as got:
        for seed in range(4):
            step(model, seed)
    assert got[-1:] == [True]
    fp8core.unconvert(model)
    step(model, 0)


def test_frozen_linears_and_adapters_share_as_far_as_they_can() -> None:
    ours, theirs = attention(), attention(shares=False)
    for model in (ours, theirs):
        model.q.weight.requires_grad_(False)  # the first holds nothing for backward
        model.v.weight.requires_grad_(False)
    for seed in range(5):
        assert are_equal(step(ours, seed), step(theirs, seed))


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # read by compiled autograd
def test_hooks_of_saved_tensors_and_compiled_autograd_see_what_they_did() -> None:
    ours, theirs = attention(), attention(shares=False)
    for seed in range(6):
        results = []
        for model in (ours, theirs):
            leaf = rows(seed).requires_grad_()
            with torch.autograd.graph.save_on_cpu() if seed == 4 else nullcontext():
                y = model(leaf * 2)
            compiler = torch.compile(backend="aot_eager")
            with compiled_autograd._enable(compiler) if seed == 5 else nullcontext():
                y.square().mean().backward(retain_graph=seed == 3)
            if seed == 3:
                y.sum().backward()
            results.append([y, leaf.grad, *(p.grad for p in model.parameters())])
            model.zero_grad()
        assert are_equal(*results), seed  # type: ignore[arg-type]


def test_frozen_weights_and_a_monitor_see_each_linear_alone() -> None:
    ours, theirs = attention(), attention(shares=False)
    for seed in range(6):
        results = []
        for model in (ours, theirs):
            with fp8core.monitor(model) if seed in (3, 4) else nullcontext():
                results.append(step(model, seed))
            with fp8core.frozen_weights(model), torch.no_grad():
                results[-1] += [model(rows(seed) * 2) for _ in range(3)]
        assert are_equal(*results), seed


def test_threads_with_one_model_and_one_input() -> None:
    model, x = attention(), rows(0)
    with torch.no_grad():
        for _ in range(3):
            want = model(x)
    wrong: list[int] = []

    def run(number: int) -> None:
        mine = x if number % 2 else x + 0
        with torch.no_grad():
            for _ in range(20):
                if not torch.equal(model(mine), want):
                    wrong.append(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_parts_of_one_tensor_are_not_taken_for_each_other() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"whole": nn.Linear(32, 32), "part": nn.Linear(16, 32)})
    fp8core.convert(model, "current")
    theirs = copy.deepcopy(model)
    theirs._fp8core_conversion.siblings = None
    x = rows(0) * 2
    for _ in range(4):
        for source in (x, x.view(-1, 32)):
            results = [[m["whole"](source), m["part"](source[..., :16])] for m in (model, theirs)]
            assert are_equal(*results)
