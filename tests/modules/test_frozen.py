"""``frozen_weights`` beside everything else that keeps, replaces, moves or recomputes weights."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.func import functional_call

import fp8core
from fp8core import Linear, OperandError, UnsupportedError, autocast, frozen_weights, recipe
from fp8core.modules import run as modules_run
from fp8core.tensors import weights
from fp8core.tensors.weights import CachingWeightQuantizer
from tests.pairs import pairs, turns
from tests.ranks import device, run_ranks

CURRENT = recipe.by_name("current")


def layer(**options: Any) -> Linear:
    torch.manual_seed(1)
    return Linear(32, 32, **options)


def values(seed: int = 5) -> torch.Tensor:
    return torch.randn(32, 32, generator=torch.Generator().manual_seed(seed))


def run(own: nn.Module, first: bool | None = None, name: str = "current") -> torch.Tensor:
    with torch.no_grad(), autocast(recipe=recipe.by_name(name)):
        y: torch.Tensor = own(values(), is_first_microbatch=first)
    return y


def anew(own: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """Return what a layer gives whose weight was never kept."""
    fresh = layer()
    fresh.load_state_dict({"weight": weight.detach(), "bias": cast(Any, own).bias.detach()})
    return run(fresh)


def test_the_weight_of_the_microbatches_before_is_not_taken() -> None:
    for is_counted in [True, False]:
        own = layer()
        run(own, True)
        (own.weight.detach() if is_counted else own.weight.data).neg_()
        with frozen_weights(own):
            assert torch.equal(run(own), anew(own, own.weight)), is_counted


def test_an_evaluation_leaves_the_weight_of_the_microbatches() -> None:
    own = layer()
    want = run(own, True)
    with frozen_weights(own):
        run(own)
        assert torch.equal(run(own, False), want)
    assert torch.equal(run(own, False), want)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_call_with_other_weights_computes_with_those(is_first: bool) -> None:
    own, others = layer(), [{"weight": values(seed)} for seed in (8, 9)]
    with frozen_weights(own), torch.no_grad(), autocast(recipe=CURRENT):
        if not is_first:
            run(own)
        got = [functional_call(own, other, (values(),)) for other in others]
        kept = run(own)
    for y, other in zip(got, others, strict=True):
        assert torch.equal(y, anew(own, other["weight"]))
    assert torch.equal(kept, anew(own, own.weight))


def test_models_whose_weights_are_stacked_keep_apart() -> None:
    models: list[nn.Module] = [layer() for _ in range(3)]
    for seed, own in enumerate(models):
        own.load_state_dict({"weight": values(seed), "bias": values(seed)[0]})
    params, _ = torch.func.stack_module_state(models)
    own = layer()
    with frozen_weights(own), torch.no_grad(), autocast(recipe=CURRENT):
        for at in (0, 1, 1, 2, 0):
            one = {name: value[at] for name, value in params.items()}
            assert torch.equal(functional_call(own, one, (values(),)), run(models[at]))


def test_a_call_with_other_parts_of_a_weight_computes_with_those() -> None:
    own = nn.utils.parametrizations.weight_norm(layer())
    names = [f"parametrizations.weight.original{at}" for at in (0, 1)]
    sizes = [values(3)[:, :1].abs(), values(3)[:, :1].abs() + 1]
    with frozen_weights(own), torch.no_grad(), autocast(recipe=CURRENT):
        got = [functional_call(own, {names[0]: size}, (values(),)) for size in sizes]
    direction = own.get_parameter(names[1])
    for y, size in zip(got, sizes, strict=True):
        assert torch.equal(y, anew(own, torch._weight_norm(direction, size, 0)))


def test_a_weight_that_each_forward_computes_from_moving_buffers_moves() -> None:
    def outputs(scope: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
        own = nn.utils.parametrizations.spectral_norm(layer())  # in training it iterates
        with scope(own):
            return [run(own) for _ in range(4)]

    want = outputs(lambda _: nullcontext())
    assert not torch.equal(want[0], want[3])
    assert all(map(torch.equal, outputs(frozen_weights), want))


def test_training_under_delayed_scaling_equals_that_without_the_scope() -> None:
    """What is frozen follows its scale: as the base of an adapter, whose input gets gradients."""

    def outputs(scope: Callable[[nn.Module], Any]) -> list[torch.Tensor]:
        own, found = layer().requires_grad_(False), []
        chosen = recipe.DelayedScaling(amax_history_len=2)
        with scope(own):
            for at in range(4):
                x = values(at).requires_grad_()
                for checkpoints in (False, True):
                    with autocast(recipe=chosen):
                        y = fp8core.checkpoint(own, x) if checkpoints else own(x)
                    with autocast(recipe=chosen), torch.no_grad():
                        found.append(own(x))
                    y.sum().backward()
                found += [y.detach(), cast(torch.Tensor, x.grad)]
        return [*found, own.scale_fwd, own.amax_history_fwd]

    assert all(map(torch.equal, outputs(frozen_weights), outputs(lambda _: nullcontext())))


def test_a_thread_that_runs_on_leaves_nothing_for_the_next_scope(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = layer()
    inside, outside = threading.Event(), threading.Event()
    kept = CachingWeightQuantizer._cached

    def slow(*arguments: Any) -> Any:
        inside.set()
        outside.wait()
        return kept(*arguments)

    thread = threading.Thread(target=run, args=(own,))
    with monkeypatch.context() as patch, frozen_weights(own):
        patch.setattr(CachingWeightQuantizer, "_cached", slow)
        thread.start()
        inside.wait()
    outside.set()
    thread.join()
    own.weight.data.neg_()
    with frozen_weights(own):
        assert torch.equal(run(own), anew(own, own.weight))


IDENTITY = torch.eye(32)
CHANGES: dict[str, tuple[torch.Tensor, torch.Tensor]] = {
    "a permutation": (IDENTITY, IDENTITY.roll(1, 0)),
    "a transpose": (
        torch.stack([torch.arange(32.0).roll(at) for at in range(32)]),
        torch.stack([torch.arange(32.0).roll(at) for at in range(32)]).t().contiguous(),
    ),
    "swapped columns": (values(), values().roll(1, 1)),
    "a negative zero": (
        torch.zeros(32, 32),
        torch.zeros(32, 32).index_fill(0, torch.tensor(3), -0.0),
    ),
    "signs at four corners": (
        torch.ones(32, 32),
        torch.ones(32, 32) - 2 * torch.outer(IDENTITY[0] + IDENTITY[9], IDENTITY[4] + IDENTITY[7]),
    ),
}


def test_a_change_that_keeps_sums_is_found() -> None:
    for change, dtype in turns(CHANGES, [torch.float32, torch.bfloat16, torch.float64]):
        before, after = (value.to(dtype) for value in CHANGES[change])
        own: Any = layer()
        own.weight = nn.Parameter(before.clone())
        with pytest.raises(OperandError, match="weight changed inside"), frozen_weights(own):
            own.weight.data.copy_(after)


def test_rearranged_parameters_of_one_dimension_are_found() -> None:
    own = layer()
    own.bias.data.copy_(torch.arange(32.0))
    with pytest.raises(OperandError, match="bias changed inside"), frozen_weights(own):
        own.bias.data.copy_(torch.arange(32.0).flip(0))


def test_memory_that_was_freed_is_not_read() -> None:
    """As fully sharded parameters between their uses."""
    own = layer()
    value = own.weight.detach().clone()
    with frozen_weights(own):
        own.weight.untyped_storage().resize_(0)
    with frozen_weights(own):
        own.weight.untyped_storage().resize_(value.nbytes)
        own.weight.data.copy_(value)


def test_what_is_no_write_raises_nothing() -> None:
    own, x = layer(), values().requires_grad_()
    with frozen_weights(own), autocast(recipe=CURRENT):
        for _ in range(2):
            own(x).sum().backward()
        own.zero_grad()
        own.requires_grad_(False)
        own.eval()
        own.register_buffer("count", torch.zeros(()))
        cast(torch.Tensor, own.count).add_(1)
        own.load_state_dict(own.state_dict())  # counted, but it writes what is there


IN_GRAPHS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: Linear(32, 32, name="fc1"),
    "LayerNormMLP": lambda: fp8core.LayerNormMLP(32, 32, name="fc1"),
    "padded": lambda: Linear(32, 33, name="fc1"),
    "groups": lambda: fp8core.GroupedLinear(1, 32, 32, name="fc1"),
}


@pytest.mark.parametrize(
    ("kind", "name", "has_kept"), pairs(IN_GRAPHS, ["current", "delayed", "mxfp8"], [False, True])
)
def test_a_graph_captured_inside_is_refused_by_name(
    kind: str, name: str, has_kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = IN_GRAPHS[kind]()
    splits = ([32],) if kind == "groups" else ()

    def call() -> torch.Tensor:
        with torch.no_grad(), autocast(recipe=recipe.by_name(name)):
            y: torch.Tensor = own(values(), *splits)
        return y

    with frozen_weights(own):
        if has_kept:
            call()
        monkeypatch.setattr(weights, "is_capturing", lambda: True)
        with pytest.raises(UnsupportedError, match=r"fc1.*frozen_weights.*quantized_model_init"):
            call()
        monkeypatch.setattr(weights, "is_capturing", lambda: False)
        want = call()
    monkeypatch.setattr(weights, "is_capturing", lambda: True)
    assert torch.equal(call(), want)  # the graph casts the weight as it is


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_graph_captured_inside_reads_weights_as_they_are_stored(
    is_stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are quantized, and those that multiply in high precision."""
    with fp8core.quantized_model_init(enabled=is_stored, recipe=CURRENT):
        own = layer()
    monkeypatch.setattr(weights, "is_capturing", lambda: True)
    with torch.no_grad(), autocast(enabled=is_stored, recipe=CURRENT):
        want = own(values())
        with frozen_weights(own):
            assert torch.equal(own(values()), want)


@pytest.mark.parametrize("name", ["current", "delayed", "block"])
def test_calls_in_the_scope_are_repeated(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the kept weight, in this scope alone, and with an error for a write to it."""
    own, bound = layer(), []
    bind = modules_run.bind

    def noted(*given: Any, **named: Any) -> Any:
        bound.append(given)
        return bind(*given, **named)

    monkeypatch.setattr(modules_run, "bind", noted)
    want = run(own, name=name)
    with frozen_weights(own):
        first = run(own, name=name)
        num_bound = len(bound)
        assert torch.equal(run(own, name=name), first)
        assert len(bound) == num_bound
        own.weight.data.neg_()  # a write that torch does not count
        assert torch.equal(run(own, name=name), first)
        own.weight.data.neg_()
    assert torch.equal(first, want)
    own.weight.detach().neg_()
    changed = run(own, name=name)
    assert torch.equal(changed, anew_by(own, name))
    with frozen_weights(own):
        for _ in range(2):
            assert torch.equal(run(own, name=name), changed)
        own.weight.detach().neg_()
        with pytest.raises(OperandError, match="written"):
            run(own, name=name)
        own.weight.detach().neg_()


def anew_by(own: Linear, name: str) -> torch.Tensor:
    fresh = layer()
    fresh.load_state_dict({"weight": own.weight.detach(), "bias": own.bias.detach()})
    return run(fresh, name=name)


def test_a_layer_that_repeats_calls_in_the_scope_is_freed_with_its_last_name() -> None:
    own = layer()
    with frozen_weights(own):
        for _ in range(2):
            run(own)
    weight = weakref.ref(own.weight)
    gc.disable()
    try:
        del own
        assert weight() is None
    finally:
        gc.enable()


# --- where each rank has a part of each weight ---

KINDS = ["fully_shard", "fully_shard, gathered", "original parameters", "flat parameters"]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Linear(32, 64), Linear(64, 32))


class Flagged(nn.Module):
    """Hands the flag to its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = model()

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        for own in self.layers:
            x = own(x, is_first_microbatch=first)
        return x


def sharded(own: nn.Module, kind: str) -> Any:
    if kind.startswith("fully_shard"):
        mesh = init_device_mesh(device().type, (2,))
        return fully_shard(own, mesh=mesh, reshard_after_forward=kind == "fully_shard")
    whole = kind == "original parameters"
    return FullyShardedDataParallel(own, device_id=device(), use_orig_params=whole)


def work(rank: int, kind: str) -> None:
    own, whole = sharded(model(), kind), model()
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.1) for one in (own, whole)]
    for _ in range(3):
        evaluated = []
        for one, optimizer in zip((own, whole), optimizers, strict=True):
            with autocast(recipe=recipe.by_name("current")):
                one(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad(), autocast(recipe=recipe.by_name("current")):
                if one is whole:
                    evaluated.append(one(x))
                    continue
                with frozen_weights(one):  # sharded at its start, gathered at its end, or not
                    evaluated += [one(x), one(x)]
        assert torch.equal(*evaluated[:2])
        assert torch.equal(*evaluated[1:])
    if kind == "fully_shard":
        with pytest.raises(OperandError, match=r"0\.weight changed inside"), frozen_weights(own):
            own[0].weight.to_local().data.neg_()
    flagged = sharded(Flagged(), kind)
    for first in (True, False, False, True, False):
        with autocast(recipe=recipe.by_name("current")):
            y = flagged(x, first)
        y.square().mean().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks(kind: str, tmp_path: Path) -> None:
    run_ranks(work, tmp_path, kind)
