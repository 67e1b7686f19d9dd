"""``fp8core.tune``: the fastest recipe under the bound, its times, and the file of the policy."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

import fp8core as te
from fp8core import recipe
from fp8core.__main__ import main
from fp8core.inspection import tuning
from fp8core.inspection.tuning import HIGH_PRECISION, Group, Times, replayed
from tests.device import DEVICE, DEVICE_TYPE
from tests.inspection.models import LAYERS, make

RECIPES = ("current", "rowwise", "block")
NAME = "NVIDIA H200" if DEVICE_TYPE == "cpu" else torch.cuda.get_device_name(DEVICE)
"""Of the device of the times: where tests run on one, the models are on it."""
US = {HIGH_PRECISION: 100.0, "current": 50.0, "rowwise": 60.0, "block": 70.0, "delayed": 40.0}


class Model(torch.nn.Module):
    """Two layers of one input, one behind them, and one that does not run."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k = te.Linear(48, 32), te.Linear(48, 64)
        self.mlp = te.LayerNormMLP(32, 64)
        self.unused = te.Linear(48, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.mlp(self.q(x)) + self.k(x)[:, :32]
        return y.square().mean()


def model() -> Model:
    made = Model()
    te.prepare(made)
    return made


def on_a_cpu() -> tuple[Model, list[torch.Tensor]]:
    """A model and batches that have no clock, wherever the tests run."""
    return model().cpu(), [batch.cpu() for batch in batches()]


def batches(spread: float = 1.0) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(24, 48) * torch.logspace(0, spread, 24)[:, None] for _ in range(2)]


@pytest.fixture(scope="module")
def times(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of times that a tuning of ``model()`` writes on a device, whose clock is faked."""
    path = tmp_path_factory.mktemp("times") / "times.json"
    asked: list[str] = []
    names: dict[int, str] = {}
    kinds: dict[type, str] = {type(recipe.by_name(n)): n for n in US if n != HIGH_PRECISION}

    def clock(replay: replayed.Replay) -> float:
        replay.run()  # which runs by itself
        asked.append(names[id(replay)])
        return US[asked[-1]]

    def init(
        replay: replayed.Replay, call: replayed.LayerCall, chosen: recipe.Recipe | None
    ) -> None:
        plain(replay, call, chosen)
        names[id(replay)] = kinds.get(type(chosen), HIGH_PRECISION)

    plain = replayed.Replay.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replayed.Replay, "__init__", init)
        patch.setattr(replayed.Replay, "microseconds", clock)
        patch.setattr(tuning, "_times", lambda *_: (Times(NAME, "a version"), True))
        te.tune(model(), batches(), bound=1, recipes=[*RECIPES, "delayed"]).times.save(path)
    assert len(asked) == 3 * 5  # once for each shape and recipe
    return path


def test_the_fastest_recipe_under_the_bound_is_chosen(times: Path) -> None:
    for bound in (0.0, 0.02, 0.06, 0.09, 0.2, 10.0):
        tuned = te.tune(model(), batches(), bound=bound, recipes=RECIPES, times=times)
        assert [group.layers for group in tuned.groups] == [["q", "k"], ["mlp"]]
        for group in tuned.groups:
            under = [us for name, us in group.us.items() if group.errors[name] <= bound]
            name = group.choose(bound)
            assert group.us[name] == min(under)
            for path in group.layers:
                chosen = tuned.recipe.choose(recipe.LayerRole("linear", path))
                assert chosen == (None if name == HIGH_PRECISION else recipe.by_name(name))
    assert all(group.choose(10.0) == "current" for group in tuned.groups)
    assert tuned.skipped == ["unused"]


def test_a_bound_of_0_leaves_high_precision_everywhere(times: Path) -> None:
    tuned = te.tune(model(), batches(), bound=0, times=times)
    assert {chosen for _, chosen in tuned.recipe.rules} == {None}
    assert tuned.recipe.default is None


@pytest.mark.usefixtures("first_algorithms")
def test_errors_are_the_largest_of_outputs_and_gradients(times: Path) -> None:
    """Against the definition, of the layer itself in float64 sums."""
    made, data = model(), batches()[:1]
    tuned = te.tune(made, data, bound=1, recipes="current", exclude="[!k]*", times=times)
    x, ways = data[0], []
    for chosen in (None, recipe.by_name("current")):
        with te.autocast(enabled=chosen is not None, recipe=chosen):
            y = made.k(x)
        gradient = torch.zeros_like(y)
        y32 = made.k(x)[:, :32].detach().requires_grad_()
        (made.mlp(made.q(x)) + y32).square().mean().backward()
        assert y32.grad is not None
        gradient[:, :32] = y32.grad
        ways.append([y, *torch.autograd.grad(y, [*made.k.parameters()], gradient)])
    worst = 0.0
    for expected, found in zip(*ways, strict=True):
        a = expected.detach().double().reshape(-1, expected.shape[-1])
        b = found.detach().double().reshape(a.shape)
        kept = a.norm(dim=1) > 0
        rows = ((a - b).norm(dim=1) / a.norm(dim=1))[kept]
        worst = max(worst, float(rows.max()), float((a - b).norm() / a.norm()))
    assert tuned.groups[0].errors["current"] == pytest.approx(worst, rel=1e-6)


def test_rows_of_small_values_decide_against_one_scale_a_tensor(times: Path) -> None:
    tuned = te.tune(model(), batches(spread=7.0), bound=0.3, recipes=RECIPES, times=times)
    of_q = tuned.groups[0]
    assert of_q.errors["current"] > 0.3 > of_q.errors["rowwise"]
    assert of_q.choose(0.3) == "rowwise"


def test_an_error_of_nan_is_never_chosen() -> None:
    group = Group(
        ["a"], {HIGH_PRECISION: 9, "current": 1}, {HIGH_PRECISION: 0, "current": math.nan}
    )
    assert group.choose(1e300) == HIGH_PRECISION
    one, nan, infinite = torch.ones(2, 2), torch.tensor([[1.0, math.nan]] * 2), torch.ones(2, 2) / 0
    assert math.isnan(replayed.relative_error([one, nan], [one, one]))
    assert math.isnan(replayed.relative_error([infinite], [infinite]))
    assert replayed.relative_error([one], [nan]) == math.inf
    assert replayed.relative_error([0 * one], [one]) == math.inf
    assert replayed.relative_error([0 * one, None], [0 * one, None]) == 0
    assert replayed.relative_error([one[:0]], [one[:0]]) == 0


def test_nan_in_a_batch_leaves_high_precision(times: Path) -> None:
    data = batches()
    data[1][3, 5] = math.nan
    tuned = te.tune(model(), data, bound=1e9, recipes=RECIPES, times=times)
    assert {group.choose(1e9) for group in tuned.groups} == {HIGH_PRECISION}
    assert "-" in tuned.table()


def test_of_equally_fast_recipes_the_more_precise_is_chosen() -> None:
    us = {HIGH_PRECISION: 2.0, "current": 1.0, "block": 1.0}
    group = Group(["a"], us, {HIGH_PRECISION: 0.0, "current": 0.2, "block": 0.1})
    assert group.choose(0.3) == "block"
    even = Group(["a"], dict.fromkeys(us, 1.0), group.errors)
    assert even.choose(0.3) == HIGH_PRECISION


@pytest.mark.usefixtures("first_algorithms")
def test_a_tuning_leaves_the_model_as_it_was(times: Path) -> None:
    made = model()
    weight = dict(made.named_parameters())["q.weight"]
    weight.grad = torch.ones_like(weight)
    before = {name: value.clone() for name, value in made.state_dict().items() if value is not None}
    with torch.no_grad():
        first = te.tune(made, batches(), bound=0.1, times=times)
    assert {name for name, p in made.named_parameters() if p.grad is not None} == {"q.weight"}
    assert bool((weight.grad == 1).all())
    after = made.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    assert not any(layer._forward_hooks for layer in (made.q, made.k, made.mlp))
    assert first == te.tune(made, batches(), bound=0.1, times=times)  # also of a model that ran
    te.monitor(made).close()


def test_a_failing_batch_releases_the_layers(times: Path) -> None:
    made = model()
    with pytest.raises(ZeroDivisionError):
        te.tune(made, [1], bound=1, loss=lambda *_: torch.ones(1 // 0), times=times)
    assert not made.q._forward_hooks
    te.monitor(made).close()


def test_a_cpu_without_times_is_refused() -> None:
    with pytest.raises(te.UnsupportedError, match=r"the model is on a CPU.*pass times="):
        te.tune(*on_a_cpu(), bound=0.1)


def test_times_of_another_device_are_refused(times: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = SimpleNamespace(get_device_name=lambda device: "another")
    monkeypatch.setattr(torch, "get_device_module", lambda device: named)
    with pytest.raises(te.OperandError, match=rf"times are of '{NAME}'.*on 'another'"):
        tuning._times(torch.device("cuda"), times)
    named.get_device_name = lambda device: NAME
    assert tuning._times(torch.device("cuda"), times) == (Times.load(times), False)


def test_times_of_other_shapes_or_recipes_are_refused(times: Path) -> None:
    with pytest.raises(te.OperandError, match=r"no time of Linear.*of \[24, 48\].*mxfp8.*has"):
        te.tune(model(), batches(), bound=0.1, recipes=["mxfp8"], times=times)
    with pytest.raises(te.OperandError, match=r"of \[8, 48\] float32.*other layers"):
        te.tune(model(), [batches()[0][:8]], bound=0.1, times=times)


def _times_of(us: str) -> str:
    return f'{{"device": "a", "versions": "b", "layers": {{"x": {{"y": {us}}}}}}}'


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"device": "a", "versions": "b", "layers": 3}']
    + [_times_of(us) for us in ("NaN", "-1", '"1"', "true", "0")],
)
def test_a_file_that_holds_no_times_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(te.OperandError, match=r"times\.json' is no file of times"):
        te.tune(model(), batches(), bound=1, times=path)


def test_the_file_of_the_recipe_reads_back(times: Path, tmp_path: Path) -> None:
    made, data = model(), batches(spread=7.0)
    groups = te.tune(made, data, bound=1, times=times).groups
    between = sum(group.errors["current"] for group in groups) / len(groups)
    tuned = te.tune(made, data, bound=between, times=times)
    tuned.save(tmp_path / "policy.json")
    loaded = recipe.load(tmp_path / "policy.json")
    assert loaded == tuned.recipe
    assert len({type(chosen) for _, chosen in tuned.recipe.rules}) > 1
    with te.autocast(recipe=loaded):  # every rule matches a layer
        model()(batches()[0]).backward()


@pytest.mark.parametrize(
    "text", ["", "null", "3", "{}", '{"recipe": "PerLayer", "rules": 3, "default": null}']
)
def test_a_file_that_holds_no_recipe_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    path.write_text(text)
    with pytest.raises(te.RecipeError, match=r"policy\.json"):
        recipe.load(path)


def _options(times: Path, **options: Any) -> dict[str, Any]:
    return {"bound": 0.1, "times": times, **options}


BAD: dict[str, dict[str, Any]] = {
    "bound=-1": {"bound": -1.0},
    "bound=nan": {"bound": math.nan},
    "bound='0.1'": {"bound": "0.1"},
    "'curent'": {"recipes": ["curent"]},
    "expected recipes of a layer": {"recipes": [recipe.PerLayer({})]},
    "'head' matches none of q, k, mlp": {"exclude": "head"},
}


@pytest.mark.parametrize("text", BAD)
def test_bad_arguments_are_named(text: str, times: Path) -> None:
    with pytest.raises(te.RecipeError, match=text):
        te.tune(model(), batches(), **_options(times, **BAD[text]))


def test_what_cannot_be_tuned_is_named(times: Path) -> None:
    def refused(match: str, made: torch.nn.Module, data: Any, **options: Any) -> None:
        with pytest.raises(te.Fp8CoreError, match=match):
            te.tune(made, data, **_options(times, **options))

    refused("tune: .* holds no fp8core layer", torch.nn.Linear(2, 2), batches())
    refused("tune: in the batches passed, no gradient reached a layer", model(), [])
    refused("every layer", model(), batches(), exclude="*")
    refused(r"pass \[batch\]", model(), batches()[0])
    refused(r"found a tensor \[24, 48\]", model(), batches(), loss=lambda _, x: x.requires_grad_())
    refused("found float", model(), batches(), loss=lambda *_: 1.0)
    refused(r"found a tensor \[\] without one", model(), batches(), loss=lambda *_: torch.ones(()))
    delays = torch.nn.Sequential(te.Linear(48, 32, delay_wgrad_compute=True))
    refused("0 accumulates or delays", delays, batches())


@pytest.mark.usefixtures("first_algorithms")
@pytest.mark.parametrize("name", LAYERS)
def test_every_kind_of_layer_is_replayed(name: str) -> None:
    layer = make(name)
    rest: tuple[Any, ...] = ()
    torch.manual_seed(2)
    x = torch.randn(21, 32, dtype=torch.bfloat16, requires_grad=True)
    if name == "grouped":
        rest = ([5, 0, 16],)
    if name == "sequential":
        rest = (torch.randn(21, 64, dtype=torch.bfloat16),)
    with replayed.captured({"": layer}) as calls:  # type: ignore[dict-item]
        sum(y.float().square().sum() for y in tree_leaves(layer(x, *rest))).backward()
    call = calls[""]
    assert "last run" not in str(call)
    assert x.grad is not None
    first, second = (replayed.Replay(call, None).results() for _ in range(2))
    assert replayed.relative_error(first, second) == 0
    assert any(torch.equal(x.grad, result) for result in first if result is not None)
    found = replayed.relative_error(
        first, replayed.Replay(call, recipe.by_name("current")).results()
    )
    assert 0 < found < 1


def case() -> tuple[object, ...]:
    """What the command is given."""
    return model(), batches()


def test_the_command_writes_what_it_is_asked_for(
    times: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    files = {name: tmp_path / name for name in ("policy.json", "again.json", "trade.png")}
    words = ["tune", f"{__name__}:case", "--bound", "0.1", "--times", str(times)]
    outputs = ["--output", "--save-times", "--plot"]
    pairs = zip(outputs, map(str, files.values()), strict=True)
    assert main([*words, *(word for pair in pairs for word in pair)]) == 0
    assert "all layers" in capsys.readouterr().out
    tuned = te.tune(model(), batches(), bound=0.1, times=times)
    assert recipe.load(files["policy.json"]) == tuned.recipe
    assert json.loads(files["again.json"].read_text()) == json.loads(times.read_text())
    assert files["trade.png"].read_bytes()[1:4] == b"PNG"


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["nowhere:case"], 2, "no MODULE:FUNCTION"),
        ([f"{__name__}:batches"], 2, "returned list"),
        ([f"{__name__}:on_a_cpu"], 1, "the model is on a CPU"),
    ],
)
def test_the_command_says_what_is_wrong(
    words: list[str], status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *words, "--bound", "0.1"]) == status
    assert text in capsys.readouterr().err


def test_a_tuned_training_follows_high_precision(times: Path) -> None:
    """The losses of 30 steps under the policy stay as near to float32's as the bound suggests."""
    tuned = te.tune(model(), batches(), bound=0.1, times=times)
    assert tuned.table().count("current") > 0
    losses = {}
    for name, chosen in (("float32", None), ("tuned", tuned.recipe)):
        made, steps = model(), []
        optimizer = torch.optim.SGD(made.parameters(), lr=0.05)
        for step in range(30):
            with te.autocast(enabled=chosen is not None, recipe=chosen):
                loss = made(batches()[step % 2])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps.append(float(loss.detach()))
        losses[name] = steps
    assert losses["float32"][-1] < losses["float32"][0] / 2
    for found, expected in zip(losses["tuned"], losses["float32"], strict=True):
        assert found == pytest.approx(expected, rel=0.1)
    assert losses["tuned"] != losses["float32"]
