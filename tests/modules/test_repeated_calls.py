"""A call like the last one runs as that did; any other call runs as in a layer without a past."""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

import fp8core
from fp8core import recipe
from fp8core.chain import run as chain
from fp8core.errors import Fp8CoreError
from fp8core.modules import grouped_linear
from fp8core.modules import run as module_run
from fp8core.modules.base import LowPrecisionModule
from fp8core.torch_ops.private import lazily_negated, lazy_zeros
from tests.device import DEVICE
from tests.pairs import pairs, turns

torch.set_num_threads(1)  # on a busy machine a second thread costs small GEMMs 20 times the work

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")


class Halves(fp8core.GroupedLinear):
    """Two groups, of half of the rows each."""

    def forward(self, input: torch.Tensor, **arguments: Any) -> Any:  # type: ignore[override]  # no sizes
        rows = input.numel() // self.in_features
        return super().forward(input, [rows // 2, rows - rows // 2], **arguments)


LAYERS: dict[str, Callable[[], LowPrecisionModule]] = {
    "Linear": lambda: fp8core.Linear(32, 32),
    "LayerNormLinear": lambda: fp8core.LayerNormLinear(32, 32),
    "LayerNormMLP": lambda: fp8core.LayerNormMLP(32, 32, activation="swiglu"),
    "GroupedLinear": lambda: Halves(2, 32, 32),
}
RECIPES = ("delayed", "current", "block", "nvfp4", "none")


def stored(kind: str, name: str) -> LowPrecisionModule:
    """A layer whose weights are stored quantized."""
    with fp8core.quantized_model_init(recipe=recipe.by_name(name)):
        return LAYERS[kind]()


def call(layer: Any, x: torch.Tensor, name: str, **arguments: Any) -> Any:
    chosen = None if name == "none" else recipe.by_name(name)
    with fp8core.autocast(enabled=chosen is not None, recipe=chosen):
        return layer(x, **arguments)


def inputs(rows: int = 16) -> torch.Tensor:
    return torch.randn(rows, 32, generator=torch.Generator().manual_seed(rows)).requires_grad_()


def train(layer: Any, x: torch.Tensor, name: str, **arguments: Any) -> list[torch.Tensor | None]:
    """Run forward and, if something needs a gradient, backward; return all results."""
    layer.zero_grad()
    y = call(layer, x, name, **arguments)
    if y.requires_grad:
        y.backward(torch.ones_like(y) / 3)
    grads = [parameter.grad for parameter in layer.parameters()]
    return [y.detach(), x.grad if x.is_leaf else None, *grads]


def negated(layer: Any, name: str) -> Any:
    return train(layer, lazily_negated(inputs().detach()).requires_grad_(), name)


def zeros(layer: Any, name: str) -> Any:
    return train(layer, lazy_zeros((16, 32), dtype=torch.float32).requires_grad_(), name)


def freed(layer: Any, name: str) -> Any:
    x = inputs().detach()
    x.untyped_storage().resize_(0)
    return train(layer, x.requires_grad_(), name)


def freed_weight(layer: Any, name: str) -> Any:
    weight = next(p for p in layer.parameters() if p.dim() == 2)
    storage, kept = weight.untyped_storage(), weight.detach().clone()
    storage.resize_(0)
    try:
        return train(layer, inputs(), name)
    finally:
        storage.resize_(kept.numel() * 4)
        weight.data.copy_(kept)


def under_torch_autocast(layer: Any, name: str) -> Any:
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        return train(layer, inputs(), name)


def without_gradients(layer: Any, name: str) -> Any:
    with torch.no_grad():
        return train(layer, inputs(), name)


def in_inference_mode(layer: Any, name: str) -> Any:
    with torch.inference_mode():
        return train(layer, inputs(), name)


def evaluating(layer: Any, name: str) -> Any:
    layer.eval()
    try:
        return train(layer, inputs(), name)
    finally:
        layer.train()


def another_recipe(layer: Any, name: str) -> Any:
    return train(layer, inputs(), "current" if name == "block" else "block")


def no_autocast(layer: Any, name: str) -> Any:
    return train(layer, inputs(), "none")


def other_rows(layer: Any, name: str) -> Any:
    return train(layer, inputs(19), name)


def no_rows(layer: Any, name: str) -> Any:
    return train(layer, torch.ones(0, 32, requires_grad=True), name)


def three_dimensions(layer: Any, name: str) -> Any:
    return train(layer, inputs().detach().reshape(2, 8, 32).requires_grad_(), name)


def transposed(layer: Any, name: str) -> Any:
    return train(layer, inputs(32).detach().t().requires_grad_(), name)


def wrong_columns(layer: Any, name: str) -> Any:
    return train(layer, torch.ones(16, 31), name)


def wrong_dtype(layer: Any, name: str) -> Any:
    return train(layer, torch.ones(16, 32, dtype=torch.bfloat16), name)


def on_meta(layer: Any, name: str) -> Any:
    return train(layer, torch.ones(16, 32, device="meta"), name)


def no_input_gradient(layer: Any, name: str) -> Any:
    return train(layer, inputs().detach(), name)


def frozen_parameters(layer: Any, name: str) -> Any:
    layer.requires_grad_(False)
    try:
        return train(layer, inputs(), name)
    finally:
        layer.requires_grad_(True)


def first_microbatch(layer: Any, name: str) -> Any:
    return train(layer, inputs(), name, is_first_microbatch=True)


def frozen_weights(layer: Any, name: str) -> Any:
    with fp8core.frozen_weights(layer):
        return [*train(layer, inputs(), name), *train(layer, inputs(), name)]


def written_in_frozen_weights(layer: Any, name: str) -> Any:
    weight = next(p for p in layer.parameters() if p.dim() == 2)
    with fp8core.frozen_weights(layer), torch.no_grad():
        call(layer, inputs(), name)
        weight.add_(0.0)
        return call(layer, inputs(), name)


def checkpointed(layer: Any, name: str) -> Any:
    x = inputs()
    with fp8core.autocast(
        enabled=name != "none", recipe=None if name == "none" else recipe.by_name(name)
    ):
        y = fp8core.checkpoint(layer, x)
    y.sum().backward()
    return [y.detach(), x.grad]


def checkpointed_after_evaluation(layer: Any, name: str) -> Any:
    without_gradients(layer, name)
    return checkpointed(layer, name)


def in_torch_checkpoint(layer: Any, name: str) -> Any:
    x = inputs()
    y = torch.utils.checkpoint.checkpoint(lambda x: call(layer, x, name), x, use_reentrant=False)
    y.sum().backward()
    return [y.detach(), x.grad]


def in_a_reentrant_checkpoint(layer: Any, name: str) -> Any:
    """Whose forward runs without gradients, and whose recompute drops what forward dropped."""
    x = inputs()
    y = torch.utils.checkpoint.checkpoint(
        lambda x: torch.nn.functional.dropout(call(layer, x, name)), x, use_reentrant=True
    )
    y.sum().backward()
    return [y.detach(), x.grad]


def in_a_hook_of_backward(layer: Any, name: str) -> Any:
    results: list[torch.Tensor] = []
    x = inputs()
    y = call(layer, x, name)
    y.register_hook(lambda grad: results.append(call(layer, inputs(), name).detach()))
    y.sum().backward()
    return [*results, x.grad]


def vmapped(layer: Any, name: str) -> Any:
    return [torch.func.vmap(lambda x: call(layer, x, name))(torch.ones(2, 16, 32))]


def forward_mode(layer: Any, name: str) -> Any:
    with forward_ad.dual_level():
        x = forward_ad.make_dual(inputs(), torch.ones(16, 32))
        primal, tangent = forward_ad.unpack_dual(call(layer, x, name))
    return [primal.detach(), None if tangent is None else tangent.detach()]


def other_weights(layer: Any, name: str) -> Any:
    named = {key: value.detach() * 2 for key, value in layer.named_parameters()}
    with fp8core.autocast(
        enabled=name != "none", recipe=None if name == "none" else recipe.by_name(name)
    ):
        return [torch.func.functional_call(layer, named, (inputs(),)).detach()]


def other_backend(layer: Any, name: str) -> Any:
    with fp8core.use_backend("reference"):
        return train(layer, inputs(), name)


def observing(layer: Any, name: str) -> Any:
    chosen = recipe.by_name("delayed")
    with fp8core.autocast(enabled=False, calibrating=True, recipe=chosen):
        y = layer(inputs())
    return [y.detach(), *(buffer.clone().float() for buffer in layer.buffers())]


def reset(layer: Any, name: str) -> Any:
    layer.reset_delayed_state()
    return train(layer, inputs(), name)


def converted(layer: Any, name: str) -> Any:
    layer.bfloat16()
    return train(layer, inputs().detach().bfloat16().requires_grad_(), name)


def in_a_failing_step(layer: Any, name: str) -> Any:
    chosen = None if name == "none" else recipe.by_name(name)
    with (
        contextlib.suppress(ZeroDivisionError),
        fp8core.autocast(enabled=chosen is not None, recipe=chosen),
    ):
        layer(inputs() * 100)
        raise ZeroDivisionError
    return [buffer.clone().float() for buffer in layer.buffers()]


def in_another_thread(layer: Any, name: str) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.extend(train(layer, inputs(), "none")))
    thread.start()
    thread.join()
    return results


OTHERS = [
    *(negated, zeros, freed, freed_weight, under_torch_autocast, without_gradients),
    *(in_inference_mode, evaluating, another_recipe, no_autocast, other_rows, no_rows),
    *(three_dimensions, transposed, wrong_columns, wrong_dtype, on_meta, no_input_gradient),
    *(frozen_parameters, first_microbatch, frozen_weights, written_in_frozen_weights),
    *(checkpointed, checkpointed_after_evaluation, in_torch_checkpoint, in_a_hook_of_backward),
    *(in_a_reentrant_checkpoint, vmapped, forward_mode),
    *(other_weights, other_backend, observing, reset, converted, in_a_failing_step),
    in_another_thread,
]


def story(
    layer: LowPrecisionModule, name: str, other: Callable[[Any, str], Any]
) -> list[torch.Tensor | str | None]:
    """Train, make another call, train again; return every result, an error as its text."""
    results: list[torch.Tensor | str | None] = []
    torch.manual_seed(3)  # every call draws as often as in a layer that remembers none
    for step in (train_plainly, train_plainly, other, train_plainly, train_plainly):
        try:
            results.extend(step(layer, name))
        except (Fp8CoreError, RuntimeError) as error:
            results.append(f"{type(error).__name__}: {error}")
    return results


def train_plainly(layer: Any, name: str) -> list[torch.Tensor | None]:
    dtype = next(layer.parameters()).dtype
    return train(layer, inputs().detach().to(dtype).requires_grad_(), name)


def assert_same(
    got: list[torch.Tensor | str | None], want: list[torch.Tensor | str | None]
) -> None:
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        if isinstance(mine, torch.Tensor) and isinstance(theirs, torch.Tensor):
            torch.testing.assert_close(mine, theirs, rtol=0, atol=0, equal_nan=True)
        else:
            assert mine == theirs


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Note of each call of a layer whether it ran as the one before."""
    run_again = module_run.run_again
    notes: list[bool] = []

    def noting(*arguments: Any) -> Any:
        output = run_again(*arguments)
        notes.append(output is not None)
        return output

    for module in (module_run, grouped_linear):
        monkeypatch.setattr(module, "run_again", noting)
    return notes


STORED = "stored Linear"
CASES = [
    *turns(["Linear"], RECIPES, OTHERS),
    *turns(["GroupedLinear", "LayerNormMLP", STORED], ["none", *RECIPES[:-1]], OTHERS),
    *turns(["LayerNormLinear"], ["delayed", "none"], [negated, other_rows, freed_weight]),
]


@pytest.mark.parametrize(("kind", "name", "other"), CASES)
def test_calls_after_another_one_are_those_of_a_layer_that_remembers_none(
    kind: str, name: str, other: Callable[[Any, str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer = stored("Linear", "current") if kind == STORED else LAYERS[kind]()
    name = "current" if kind == STORED else name
    without_a_past = copy.deepcopy(layer)
    got = story(layer, name, other)
    monkeypatch.setattr(chain, "likeness_to", lambda *tensors: None)
    assert_same(got, story(without_a_past, name, other))


@pytest.mark.parametrize("kind", LAYERS)
def test_a_call_like_the_last_one_is_repeated(kind: str, repeats: list[bool]) -> None:
    for name in ("delayed", "current", "none"):
        layer = LAYERS[kind]()
        repeats.clear()
        for rows in (16, 16, 24):
            train(layer, inputs(rows), name)
        assert repeats == [False, True, kind != "GroupedLinear"]  # other sizes of its groups


@pytest.mark.parametrize("kind", LAYERS)
def test_a_call_with_stored_weights_is_repeated(kind: str, repeats: list[bool]) -> None:
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        layer = stored(kind, "current")
        repeats.clear()
        with mode():
            for rows in (16, 16, 24):
                train(layer, inputs(rows), "current")
        assert repeats == [False, True, kind != "GroupedLinear"]  # other sizes of its groups


SEQUENCES = (8, 2, 32)
HEADS = (8, 2, 2, 16)
TRANSFORMER = {"fuse_qkv_params": True, "attention_dropout": 0.0}
ALL: dict[str, tuple[Callable[[], torch.nn.Module], tuple[tuple[int, ...], ...]]] = {
    **{kind: (make, ((16, 32),)) for kind, make in LAYERS.items()},
    "LayerNorm": (lambda: fp8core.LayerNorm(32), ((16, 32),)),
    "Sequential": (
        lambda: fp8core.ops.Sequential(fp8core.ops.Linear(32, 64), fp8core.ops.GELU()),
        ((16, 32),),
    ),
    "converted": (
        lambda: torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 64)),
        ((16, 32),),
    ),
    "DotProductAttention": (
        lambda: fp8core.DotProductAttention(2, 16, attn_mask_type="causal"),
        (HEADS,) * 3,
    ),
    "MultiheadAttention": (lambda: fp8core.MultiheadAttention(32, 2, **TRANSFORMER), (SEQUENCES,)),
    "TransformerLayer": (
        lambda: fp8core.TransformerLayer(32, 64, 2, hidden_dropout=0.0, **TRANSFORMER),
        (SEQUENCES,),
    ),
}


def front_end_calls(run: Callable[[], object]) -> list[str]:
    """Return the functions of the front end that ``run`` calls, each as often as it does."""
    seen: list[str] = []

    def note(frame: Any, event: str, argument: object) -> None:
        if event == "call" and frame.f_globals.get("__name__", "").startswith("fp8core."):
            seen.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return seen


@pytest.mark.parametrize(
    ("kind", "name", "is_stored", "mode"),
    [
        (kind, name, *how)
        for (kind, how), name in turns(
            pairs(ALL, pairs([False, True], [torch.no_grad, torch.inference_mode])),
            ["none", *recipe.names()],
        )
    ],
)
def test_later_calls_without_gradients_are_neither_checked_nor_bound(
    kind: str, name: str, is_stored: bool, mode: Callable[[], Any]
) -> None:
    make, shapes = ALL[kind]
    chosen = None if name == "none" else recipe.by_name(name)
    with fp8core.quantized_model_init(enabled=is_stored and chosen is not None, recipe=chosen):
        layer = make()
    if kind == "converted":
        fp8core.convert(layer)
        for module in layer.modules():
            if is_stored and chosen is not None and isinstance(module, torch.nn.Linear):
                store(module, chosen)
    given = [torch.randn(shape) for shape in shapes]

    def run() -> None:
        with mode(), fp8core.autocast(enabled=chosen is not None, recipe=chosen):
            layer(*given)

    first, *later = (front_end_calls(run) for _ in range(4))
    assert "bind" in first
    assert later[0] == later[1] == later[2]
    assert not {"bind", "check_input", "remember", "checked_qkv"}.intersection(later[0])


def store(linear: torch.nn.Linear, chosen: recipe.Recipe) -> None:
    """Have ``linear`` hold its weight as fp8core's own layer does under ``chosen``."""
    with fp8core.quantized_model_init(recipe=chosen):
        own = fp8core.Linear(linear.in_features, linear.out_features)
    linear.weight = own.weight


@pytest.mark.parametrize("kind", LAYERS)
def test_a_call_with_stored_weights_that_were_freed_is_no_repetition(
    kind: str, repeats: list[bool]
) -> None:
    layer = stored(kind, "current")
    train(layer, inputs(), "current")
    weight = next(p for p in layer.parameters() if p.dim() == 2)
    assert isinstance(weight, fp8core.QuantizedTensor)
    weight.tensors()[0].untyped_storage().resize_(0)
    with pytest.raises((Fp8CoreError, RuntimeError)):
        train(layer, inputs(), "current")
    assert repeats == [False, False]


def test_a_change_of_recipe_is_forgotten_with_the_next_call(repeats: list[bool]) -> None:
    layer = LAYERS["Linear"]()
    for name in ("current", "block", "block", "current", "current"):
        train(layer, inputs(), name)
    assert repeats == [False, False, True, False, True]


def test_a_call_with_other_backends_or_in_another_mode_is_no_repetition(
    repeats: list[bool],
) -> None:
    layer = LAYERS["Linear"]()
    train(layer, inputs(), "current")
    with fp8core.use_backend("reference"):
        train(layer, inputs(), "current")
    with fp8core.use_backend("reference"):
        train(layer, inputs(), "current")
    train(layer, inputs(), "current")
    evaluating(layer, "current")
    assert repeats == [False, False, True, False, False]


def test_a_watched_layer_runs_the_links_of_its_watch(repeats: list[bool]) -> None:
    layer = LAYERS["Linear"]()
    train(layer, inputs(), "current")
    with fp8core.monitor(layer) as watch:
        train(layer, inputs(), "current")
        watch.step()
        assert watch.rows
    assert repeats == [False, False]
