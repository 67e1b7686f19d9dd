"""Recompute in backward equals no recompute bit for bit, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.utils.checkpoint

import fp8core
from fp8core import OperandError, UnsupportedError, autocast, ops, recipe
from tests.dispatch import toys

Run = Callable[[torch.nn.Module, torch.Tensor], torch.Tensor]
BOTH = pytest.mark.parametrize("use_reentrant", [True, False])


def model() -> torch.nn.Sequential:
    """Return layers of every kind, with dropout."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        fp8core.LayerNormMLP(32, 64, activation="swiglu"),
        fp8core.LayerNormLinear(32, 32, return_bias=False),
        ops.Sequential(ops.Linear(32, 64), ops.Dropout(0.3), ops.GELU(), ops.Linear(64, 32)),
    )


def step(
    layers: torch.nn.Module, x: torch.Tensor, chosen: recipe.Recipe | None, run: Run
) -> list[torch.Tensor]:
    """Return the output, the gradients and the state after one step."""
    torch.manual_seed(5)
    x = x.clone().requires_grad_()
    layers.zero_grad()
    with autocast(enabled=chosen is not None, recipe=chosen):
        y = run(layers, x)
    y.square().sum().backward()
    grads = [own.grad.clone() for own in (x, *layers.parameters())]
    return [y.detach(), *grads, *(value.clone() for value in layers.state_dict().values())]


def plain(layers: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layers(x)


def checkpointed(use_reentrant: bool) -> Run:
    def run(layers: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x = fp8core.checkpoint(layer, x, use_reentrant=use_reentrant)
        return x

    return run


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return len(got) == len(want) and all(map(torch.equal, got, want))


def around_all(use_reentrant: bool) -> Run:
    return lambda layers, x: fp8core.checkpoint(layers, x, use_reentrant=use_reentrant)


def nested(use_reentrant: bool) -> Run:
    inner = checkpointed(use_reentrant)
    return lambda layers, x: fp8core.checkpoint(inner, layers, x, use_reentrant=use_reentrant)


def twice(run: Run) -> Run:
    return lambda layers, x: run(layers, run(layers, x))


@BOTH
@pytest.mark.parametrize("is_used_twice", [False, True])
@pytest.mark.parametrize("place", [checkpointed, around_all, nested])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch, of the inner
def test_a_step_equals_one_without_a_checkpoint(
    place: Callable[[bool], Run], is_used_twice: bool, use_reentrant: bool
) -> None:
    chosen, x = recipe.DelayedScaling(amax_history_len=2), torch.randn(32, 32)
    runs = [place(use_reentrant), plain]
    found = [step(model(), x, chosen, twice(run) if is_used_twice else run) for run in runs]
    assert same(*found)


@BOTH
def test_the_amax_advances_once(use_reentrant: bool) -> None:
    layer, chosen = fp8core.Linear(32, 32), recipe.DelayedScaling(amax_history_len=4)
    x = torch.ones(8, 32, requires_grad=True)
    with autocast(recipe=chosen):
        y = fp8core.checkpoint(layer, x, use_reentrant=use_reentrant)
    y.sum().backward()
    assert layer.amax_history_fwd[:, 0].tolist() == [0, 0, 0, 1]
    assert layer.amax_history_bwd[:, 0].tolist() == [0, 0, 0, 1]


@BOTH
def test_an_autocast_inside_the_function_equals_no_checkpoint(use_reentrant: bool) -> None:
    chosen, x = recipe.DelayedScaling(amax_history_len=2), torch.randn(32, 32)

    def inside(layers: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        with autocast(recipe=chosen):
            return layers(x)

    def run(layers: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return fp8core.checkpoint(inside, layers, x, use_reentrant=use_reentrant)

    assert same(step(model(), x, None, run), step(model(), x, None, inside))


def test_saved_tensors_may_be_read_outside_backward() -> None:
    layer, x = fp8core.Linear(32, 32), torch.randn(32, 32, requires_grad=True)
    with autocast(recipe=recipe.by_name("delayed")):
        y = fp8core.checkpoint(lambda x: layer(x).sin(), x, use_reentrant=False)
        want = layer(x)
    assert torch.equal(y.grad_fn._saved_self, want)


@BOTH
def test_an_evaluation_needs_no_gradient(use_reentrant: bool) -> None:
    layer, x = fp8core.Linear(32, 32), torch.randn(32, 32, requires_grad=True)
    with torch.no_grad(), autocast(recipe=recipe.by_name("delayed")):
        assert torch.equal(fp8core.checkpoint(layer, x, use_reentrant=use_reentrant), layer(x))


@pytest.mark.parametrize(
    "arguments", [{"distribute_saved_activations": True}, {"get_rng_state_tracker": 1}]
)
def test_tensor_parallel_arguments_are_refused(arguments: dict[str, object]) -> None:
    with pytest.raises(UnsupportedError, match=next(iter(arguments))):
        fp8core.checkpoint(torch.sin, torch.ones(1), **arguments)


def forward(
    layer: torch.nn.Module, name: str = "current", use_reentrant: bool = False
) -> torch.Tensor:
    with autocast(recipe=recipe.by_name(name)):
        x = torch.randn(32, 32, requires_grad=True)
        return fp8core.checkpoint(layer, x, use_reentrant=use_reentrant)


@BOTH
@pytest.mark.parametrize("parameter", ["weight", "bias", "key_weight"])
def test_a_parameter_written_in_between_is_refused(parameter: str, use_reentrant: bool) -> None:
    split = {"parameters_split": ("query", "key")} if parameter == "key_weight" else {}
    layer = fp8core.Linear(32, 32, **split)
    y = forward(layer, use_reentrant=use_reentrant)
    with torch.no_grad():
        getattr(layer, parameter).add_(1)
    with pytest.raises(OperandError, match=r"Linear.*written between forward and backward"):
        y.sum().backward()


@BOTH
def test_another_recipe_in_the_recompute_is_refused(use_reentrant: bool) -> None:
    layer, names = fp8core.Linear(32, 32), ["current", "block"]

    def alternating(x: torch.Tensor) -> torch.Tensor:
        with autocast(recipe=recipe.by_name(names.pop(0))):
            return layer(x)

    y = fp8core.checkpoint(
        alternating, torch.randn(32, 32, requires_grad=True), use_reentrant=use_reentrant
    )
    with pytest.raises(OperandError, match="recipe, dtype, device or backend differ"):
        y.sum().backward()


@BOTH
@pytest.mark.usefixtures("isolated")
def test_the_recompute_runs_on_the_backend_of_its_forward(use_reentrant: bool) -> None:
    calls: list[str] = []
    toys.register(toys.backend("toy", calls=calls, priority=-1))
    layer, x = fp8core.Linear(32, 32), torch.randn(32, 32, requires_grad=True)
    with autocast(recipe=recipe.by_name("current")), fp8core.use_backend("toy"):
        y = fp8core.checkpoint(layer, x, use_reentrant=use_reentrant)
    calls.clear()
    y.sum().backward()
    assert calls.count("gemm") == 3


@BOTH
def test_another_layer_in_the_recompute_is_refused(use_reentrant: bool) -> None:
    layers = [fp8core.Linear(32, 32, name=name) for name in ("first", "second")]
    y = fp8core.checkpoint(
        lambda x: layers.pop(0)(x),
        torch.randn(32, 32, requires_grad=True),
        use_reentrant=use_reentrant,
    )
    with pytest.raises(OperandError, match=r"'second'.*'first'"):
        y.sum().backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_keywords_are_handed_on(use_reentrant: bool) -> None:
    layer, x = fp8core.Linear(32, 32), torch.randn(32, 32, requires_grad=True)
    with autocast(recipe=recipe.by_name("current")):
        again = {"use_reentrant": use_reentrant, "is_first_microbatch": True}
        fp8core.checkpoint(layer, x, **again).sum().backward()
        made = x.grad
        x.grad = None
        layer(x, is_first_microbatch=False).sum().backward()
    assert made is not None
    assert torch.equal(made, x.grad)


def test_a_keyword_whose_gradient_would_get_lost_is_refused() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(UnsupportedError, match="needs use_reentrant=False"):
        fp8core.checkpoint(lambda a, *, b: a + b, x, b=x)


@BOTH
@pytest.mark.parametrize("is_trained", [True, False])
def test_a_bias_that_is_returned_stays_a_parameter(is_trained: bool, use_reentrant: bool) -> None:
    gradients = []
    for is_checkpointed in (False, True):
        torch.manual_seed(0)
        layer = fp8core.LayerNormMLP(32, 64, return_bias=True).requires_grad_(is_trained)
        x = torch.randn(8, 32, requires_grad=True)
        with autocast(recipe=recipe.Float8CurrentScaling()):
            if is_checkpointed:
                y, bias = fp8core.checkpoint(layer, x, use_reentrant=use_reentrant)
            else:
                y, bias = layer(x)
        assert all(parameter.is_leaf for parameter in layer.parameters())
        (y + bias).square().sum().backward()
        gradients.append([own.grad for own in (x, *layer.parameters()) if own.requires_grad])
    assert same(*gradients)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_forward_that_raises_leaves_no_hooks_open(use_reentrant: bool) -> None:
    """Whoever keeps the error: torch 2.11 closed them with its traceback."""

    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError(f"no {(x * x).numel()} numbers")

    x = torch.randn(3, requires_grad=True)
    with pytest.raises(ValueError, match="no 3 numbers") as caught:
        fp8core.checkpoint(fails, x, use_reentrant=use_reentrant)
    assert torch.equal(torch.func.grad(torch.sum)(x), torch.ones(3))  # refused while hooks are open
    assert caught.traceback[-1].name == "fails"
