"""The precision plug-in in Lightning's Fabric and Trainer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fp8core
from fp8core import RecipeError
from fp8core.recipe import DelayedScaling, Float8CurrentScaling, Recipe

pytest.importorskip("lightning", reason="lightning is not installed")

# Advice of Lightning about loggers, workers and checkpoints, which a test needs none of.
pytestmark = [
    pytest.mark.filterwarnings("ignore::lightning.fabric.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*(logger|num_workers|Checkpoint directory|isinstance)"),
]

from lightning import Fabric, LightningModule, Trainer  # noqa: E402  skipped without it

from fp8core.lightning import Fp8CorePrecision  # noqa: E402

DELAYED = DelayedScaling(amax_history_len=4)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 32))


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(32, 32, generator=generator) for _ in range(count)]


def fabric(*given: Any, **named: Any) -> Any:
    return Fabric(accelerator="cpu", devices=1, plugins=[Fp8CorePrecision(*given, **named)])


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.5)


def fit(own: Any, model: Any, optimizer: Any, data: list[torch.Tensor]) -> list[float]:
    """The losses of a loop of Fabric."""
    losses = []
    for batch in data:
        loss = (model(batch) - batch).square().mean()
        own.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def by_hand(recipe: Recipe | str, steps: int) -> list[float]:
    """The losses of a loop without Lightning, in float32 weights under autocast."""
    model, losses = network(), []
    fp8core.convert(model, recipe)
    optimizer = optimizer_of(model)
    for batch in batches(steps):
        with torch.autocast("cpu", torch.bfloat16):
            output = model(batch)
        loss = (output.float() - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", ["mxfp8", "current", DELAYED], ids=str)
def test_fabric_trains_an_optimizer_of_before_as_a_loop_by_hand(recipe: Recipe | str) -> None:
    own = fabric(recipe)
    model = network()
    losses = fit(own, *own.setup(model, optimizer_of(model)), batches(4))
    assert losses == by_hand(recipe, 4)
    assert losses[-1] < 0.9 * losses[0]  # it is not frozen


def test_the_recipe_is_what_runs() -> None:
    """Losses of recipes can be alike, so the codes are looked at."""
    own = fabric(Float8CurrentScaling())
    model = own.setup(network())
    model(batches(1)[0])
    assert "Float8CurrentScaling" in repr(model.module)


@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16])
def test_init_module_creates_the_weights_in_their_dtype(weights: torch.dtype) -> None:
    own = fabric("mxfp8", weights_dtype=weights)
    with own.init_module():
        model = nn.Sequential(nn.Linear(32, 64, device="cpu"), fp8core.Linear(64, 32, device="cpu"))
    assert {parameter.dtype for parameter in model.parameters()} == {weights}
    ready = own.setup(model)
    output = ready(batches(1)[0])
    assert output.dtype == torch.float32
    own.backward(output.sum())
    assert {parameter.grad.dtype for parameter in model.parameters()} == {weights}  # type: ignore[union-attr]


def test_fabric_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    def start() -> tuple[Any, Any, Any]:
        own = fabric(DELAYED)
        model = network()
        return (own, *own.setup(model, optimizer_of(model)))

    own, model, optimizer = start()
    fit(own, model, optimizer, batches(4)[:2])
    own.save(tmp_path / "state.ckpt", {"model": model, "optimizer": optimizer})
    want = fit(own, model, optimizer, batches(4)[2:])
    own, model, optimizer = start()
    own.load(tmp_path / "state.ckpt", {"model": model, "optimizer": optimizer})
    assert fit(own, model, optimizer, batches(4)[2:]) == want


def test_a_delayed_scale_follows_the_largest_of_accumulated_microbatches() -> None:
    own = fabric(DELAYED)
    model = network()
    ready, optimizer = own.setup(model, optimizer_of(model))
    first, second = batches(2)
    for batch in (8 * first, second):  # the last one has the smaller amax
        own.backward(ready(batch).square().mean())
    optimizer.step()
    scale = model[0].scale_fwd[0].item()
    assert scale == pytest.approx(448 / (8 * first).bfloat16().abs().max().item())


class Module(LightningModule):  # type: ignore[misc]  # Any to the check
    def __init__(self) -> None:
        super().__init__()
        self.net = network()
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = (self.net(batch).float() - batch).square().mean()
        self.losses.append(loss.item())
        return loss

    def test_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("test_loss", (self.net(batch).float() - batch).square().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return optimizer_of(self)


def loader(count: int) -> Any:
    return torch.utils.data.DataLoader(batches(count), batch_size=None)  # type: ignore[arg-type]


def trainer(folder: Path, precision: Any, **named: Any) -> Any:
    settings = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return Trainer(default_root_dir=folder, plugins=[precision], **{**settings, **named})


def test_fabric_trains_a_lightning_module() -> None:
    own = fabric("mxfp8")
    model = Module()
    ready, optimizer = own.setup(model, optimizer_of(model))
    for batch in batches(4):
        with own.autocast():  # Lightning does not enter it for other methods than forward
            loss = ready.training_step(batch, 0)
        own.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert model.losses == by_hand("mxfp8", 4)


@pytest.mark.parametrize("recipe", ["mxfp8", DELAYED], ids=str)
def test_trainer_trains_as_a_loop_by_hand(recipe: Recipe | str, tmp_path: Path) -> None:
    model = Module()
    trainer(tmp_path, Fp8CorePrecision(recipe)).fit(model, loader(4))
    assert model.losses == by_hand(recipe, 4)


@pytest.mark.parametrize("recipe", ["mxfp8", DELAYED], ids=str)
def test_trainer_resumes_from_a_checkpoint(recipe: Recipe | str, tmp_path: Path) -> None:
    precision = Fp8CorePrecision(recipe)
    whole = Module()
    first = trainer(tmp_path, precision, max_epochs=2)
    first.fit(whole, loader(2))
    half = trainer(tmp_path, precision)
    half.fit(Module(), loader(2))
    half.save_checkpoint(tmp_path / "half.ckpt")
    rest = Module()
    again = Fp8CorePrecision(recipe)
    again.convert_module(rest)  # so that the module has the delayed state that is loaded
    trainer(tmp_path, again, max_epochs=2).fit(
        rest, loader(2), ckpt_path=tmp_path / "half.ckpt", weights_only=False
    )
    assert rest.losses == whole.losses[2:]


def test_trainer_tests_the_model_that_it_fitted(tmp_path: Path) -> None:
    precision, model = Fp8CorePrecision(DELAYED), Module()
    own = trainer(tmp_path, precision)
    own.fit(model, loader(2))
    (result,) = own.test(model, loader(1), verbose=False)
    assert result["test_loss"] < model.losses[0]


def test_trainer_accumulates_gradients(tmp_path: Path) -> None:
    model = Module()
    trainer(tmp_path, Fp8CorePrecision("mxfp8"), accumulate_grad_batches=2).fit(model, loader(4))
    plain = network()
    fp8core.convert(plain, "mxfp8")
    optimizer = optimizer_of(plain)
    for number, batch in enumerate(batches(4)):
        with torch.autocast("cpu", torch.bfloat16):
            output = plain(batch)
        ((output.float() - batch).square().mean() / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()
    for got, want in zip(model.net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(got, want)


def test_a_converted_model_keeps_its_recipe(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    fp8core.convert(model, "current")
    with caplog.at_level(logging.INFO, "fp8core"):
        ready = fabric("mxfp8").setup(model)
        ready(batches(1)[0])
    assert "is converted already, and keeps its recipe" in caplog.text
    assert "Float8CurrentScaling" in repr(model)


def test_layers_named_in_skip_stay() -> None:
    model = network()
    fabric("mxfp8", skip="3").setup(model)
    assert type(model[3]) is nn.Linear
    assert type(model[0]) is not nn.Linear


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"recipe": "mxpf8"}, "Did you mean 'mxfp8'"),
        ({"recipe": None}, "bf16-mixed"),
        ({"recipe": {"recipe": "DelayedScaling", "interval": 1}}, "has no field 'interval'"),
        ({"weights_dtype": torch.float64}, r"weights_dtype=torch.float64\): expected one of"),
    ],
)
def test_wrong_arguments_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        Fp8CorePrecision(**given)
