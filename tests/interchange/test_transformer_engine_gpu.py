"""A run moves to Transformer Engine's modules on a GPU, and back, with its delayed scaling.

Both libraries run the same layers from the same weights and state: each one's scales and amax
histories are the other's, and the next step of both gives the same amaxes of inputs and weights.
Runs where Transformer Engine is installed; it was with 2.20.2 on an H200.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import fp8core
from fp8core.checkpoints import transformer_engine_state_dict
from fp8core.recipe import DelayedScaling

pytestmark = [
    pytest.mark.needs_accelerator("cuda"),
    pytest.mark.filterwarnings("ignore"),  # those that Transformer Engine gives when it is imported
]

HIDDEN, FFN, ROWS, HISTORY, STEPS = 512, 1024, 256, 4, 3
OURS = DelayedScaling(amax_history_len=HISTORY)
STATE = ("scale_fwd", "amax_history_fwd", "scale_bwd", "amax_history_bwd")
ALLOWED = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
# All was equal bit for bit but for gradients of biases, which are summed in another order; a wrong
# scale errs by far more, since the inputs are larger than the largest value of e4m3.
NEAR, INPUT_SIZE = 0.001, 1000.0


class Side(NamedTuple):
    """A library: its model, and its context of low precision."""

    model: torch.nn.Module
    autocast: Any


def _model(library: Any) -> torch.nn.Module:
    options = {"params_dtype": torch.bfloat16, "device": "cuda"}
    torch.manual_seed(0)
    return torch.nn.Sequential(
        library.Linear(HIDDEN, FFN, **options),
        library.LayerNormLinear(FFN, HIDDEN, **options),
        library.LayerNormMLP(HIDDEN, FFN, **options),
    )


def _ours() -> Side:
    return Side(_model(fp8core), lambda: fp8core.autocast(recipe=OURS))


def _theirs() -> Side:
    te = pytest.importorskip("transformer_engine.pytorch")
    from transformer_engine.common import recipe

    scaling = recipe.DelayedScaling(
        fp8_format=recipe.Format.HYBRID, amax_history_len=HISTORY, amax_compute_algo="max"
    )
    return Side(_model(te), lambda: te.autocast(enabled=True, recipe=scaling))


def _step(side: Side, seed: int) -> dict[str, torch.Tensor]:
    """Run a step, and return its output and gradients."""
    torch.manual_seed(seed)
    x = (torch.randn(ROWS, HIDDEN, device="cuda") * INPUT_SIZE).bfloat16().requires_grad_()
    side.model.zero_grad()
    with side.autocast():
        y = side.model(x)
    y.backward(torch.randn_like(y))
    assert x.grad is not None
    grads = {n: p.grad for n, p in side.model.named_parameters() if p.grad is not None}
    return {"output": y.detach(), "input": x.grad, **grads}


def _train(side: Side) -> None:
    optimizer = torch.optim.SGD(side.model.parameters(), lr=1e-3)
    for seed in range(STEPS):
        _step(side, seed)
        optimizer.step()


def _state(layer: Any) -> dict[str, torch.Tensor]:
    """Return the delayed state of a layer of either library."""
    if isinstance(layer, fp8core.modules.calls.base.LowPrecisionModule):
        return {name: layer.get_buffer(name).clone() for name in STATE}
    forward, backward = layer.fp8_meta["scaling_fwd"], layer.fp8_meta["scaling_bwd"]
    tensors = (forward.scale, forward.amax_history, backward.scale, backward.amax_history)
    return {name: tensor.clone() for name, tensor in zip(STATE, tensors, strict=True)}


class Moved(NamedTuple):
    """A run that was moved: both states right after, and both next steps."""

    direction: str
    states: tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]
    steps: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]
    after: tuple[list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]


@pytest.fixture(scope="module", params=["from", "to"])
def moved(request: pytest.FixtureRequest) -> Moved:
    ours, theirs = _ours(), _theirs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ALLOWED, "1")
        if request.param == "from":
            _train(theirs)
            ours.model.load_state_dict(theirs.model.state_dict())
        else:
            _train(ours)
            theirs.model.load_state_dict(transformer_engine_state_dict(ours.model, OURS))
    sides = (ours, theirs)
    states = tuple([_state(layer) for layer in side.model] for side in sides)  # type: ignore[attr-defined]
    steps = tuple(_step(side, STEPS) for side in sides)
    after = tuple([_state(layer) for layer in side.model] for side in sides)  # type: ignore[attr-defined]
    return Moved(request.param, states, steps, after)  # type: ignore[arg-type]  # pairs


def _relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())


def test_scales_and_histories_move_exactly(moved: Moved) -> None:
    for ours, theirs in zip(*moved.states, strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in STATE)
        assert bool((ours["scale_fwd"][:2] != 1).all())  # a state of training


def test_the_next_step_computes_the_same(moved: Moved) -> None:
    ours, theirs = moved.steps
    errors = {name: _relative(ours[name], theirs[name]) for name in theirs}
    print(moved.direction, {name: f"{error:.2e}" for name, error in errors.items()})
    assert max(errors.values()) < NEAR, errors


def test_the_next_step_records_the_same_amaxes(moved: Moved) -> None:
    first = [layers[0] for layers in moved.after]
    # The first layer's input and weight are the same bits on both sides.
    for name in ("scale_fwd", "amax_history_fwd"):
        assert torch.equal(first[0][name][..., :2], first[1][name][..., :2]), name


def test_a_fresh_state_computes_something_else(moved: Moved) -> None:
    fresh = _ours()
    assert _relative(_step(fresh, STEPS)["output"], moved.steps[1]["output"]) > 0.1


def test_transformer_engine_takes_the_state_only_where_it_is_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = _ours(), _theirs()
    _step(ours, 0)
    monkeypatch.delenv(ALLOWED, raising=False)
    with pytest.raises(RuntimeError, match=ALLOWED):
        theirs.model.load_state_dict(transformer_engine_state_dict(ours.model, OURS))


GROUPS = [64, 192]


def _grouped(library: Any) -> Any:
    torch.manual_seed(0)
    options = {"bias": False, "params_dtype": torch.bfloat16, "device": "cuda"}
    return library.GroupedLinear(len(GROUPS), HIDDEN, FFN, **options)


def _grouped_step(layer: Any, autocast: Any, seed: int) -> torch.Tensor:
    """Run a step on groups of unequal sizes and values, and return the output."""
    torch.manual_seed(seed)
    parts = [torch.randn(rows, HIDDEN, device="cuda") * 30.0**at for at, rows in enumerate(GROUPS)]
    x = (torch.cat(parts) * 20).bfloat16().requires_grad_()
    with autocast():
        y: torch.Tensor = layer(x, GROUPS)
    y.backward(torch.randn_like(y))
    return y.detach()


def test_grouped_linears_take_each_other_s_state(monkeypatch: pytest.MonkeyPatch) -> None:
    te = pytest.importorskip("transformer_engine.pytorch")
    monkeypatch.setenv(ALLOWED, "1")
    contexts = (_ours().autocast, _theirs().autocast)
    for sides in ((fp8core, te), (te, fp8core)):
        autocasts = contexts if sides[0] is fp8core else contexts[::-1]
        trained, other = _grouped(sides[0]), _grouped(sides[1])
        for seed in range(STEPS):
            _grouped_step(trained, autocasts[0], seed)
        is_ours = sides[0] is fp8core
        state = transformer_engine_state_dict(trained, OURS) if is_ours else trained.state_dict()
        other.load_state_dict(state)
        before, after = _state(trained), _state(other)
        assert all(torch.equal(before[name], after[name]) for name in STATE)
        assert before["scale_fwd"][0] > 10 * before["scale_fwd"][3]  # of the groups' inputs
        steps = [
            _grouped_step(layer, autocast, STEPS)
            for layer, autocast in zip((trained, other), autocasts, strict=True)
        ]
        error = _relative(*steps)
        print("output of grouped linears", f"{error:.2e}")
        assert error < NEAR


def _attend(layer: Any, autocast: Any, before: Any = None) -> torch.Tensor:
    """Run a step of attention on inputs of three sizes, and return its output.

    ``before`` is a linear for the queries; without one Transformer Engine updates no backward
    scale.
    """
    torch.manual_seed(0)
    sizes = (2.0, 4.0, 8.0)
    q, k, v = (
        (torch.randn(2, 512, 4, 128, device="cuda") * size).bfloat16().requires_grad_()
        for size in sizes
    )
    with autocast():
        queries = q if before is None else before(q.flatten(2)).view_as(q)
        y: torch.Tensor = layer(queries, k, v, qkv_format="bshd", attn_mask_type="causal")
    y.backward(torch.randn_like(y))
    return y.detach()


def _their_attention() -> tuple[Any, Any]:
    te = pytest.importorskip("transformer_engine.pytorch")
    from transformer_engine.common import recipe

    scaling = recipe.DelayedScaling(
        fp8_format=recipe.Format.HYBRID, amax_history_len=HISTORY, fp8_dpa=True
    )
    layer = te.DotProductAttention(4, 128, attention_dropout=0.0)
    return layer, lambda: te.autocast(enabled=True, recipe=scaling)


ATTENTION = DelayedScaling(amax_history_len=HISTORY, fp8_dpa=True, fp8_dpa_backward="fp8")


def test_attention_takes_the_state_of_a_run() -> None:
    layer, autocast = _their_attention()
    te = pytest.importorskip("transformer_engine.pytorch")
    before = te.Linear(HIDDEN, HIDDEN, params_dtype=torch.bfloat16, device="cuda")
    for _ in range(STEPS):
        _attend(layer, autocast, before)
    ours = fp8core.DotProductAttention(4, 128)
    ours.load_state_dict({"_extra_state": layer.get_extra_state()})
    theirs = _state(layer)
    for name, places in (("scale_fwd", [2, 2, 2, 8]), ("scale_bwd", [3, 5])):
        taken = ours.get_buffer(name)[: len(places)]
        assert torch.equal(taken.cpu(), theirs[name][places].cpu()), name
        assert bool((taken != 1).all())


def test_attention_of_transformer_engine_takes_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ALLOWED, "1")
    layer, autocast = _their_attention()
    expected = [_attend(layer, autocast) for _ in range(STEPS)][-1]
    ours = fp8core.DotProductAttention(4, 128)
    with fp8core.use_backend("reference"):
        for _ in range(STEPS):
            _attend(ours, lambda: fp8core.autocast(recipe=ATTENTION))
    other, autocast = _their_attention()
    other.set_extra_state(transformer_engine_state_dict(ours, ATTENTION)["_extra_state"])
    states = _state(layer), _state(other)
    for slot in (2, 8):  # of the inputs and of the weights
        ratio = float(states[0]["scale_fwd"][slot] / states[1]["scale_fwd"][slot])
        print("slot", slot, "scale of theirs over ours", ratio)
        assert 0.5 < ratio < 2.0
    output = _attend(other, autocast)
    print("output", f"{_relative(output, expected):.2e}")
    assert _relative(output, expected) < 0.1
