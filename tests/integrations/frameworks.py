"""What each framework does with its path to Transformer Engine, run on fp8core under that name.

``fp8core run --as-transformer-engine python -m tests.integrations.frameworks NAME`` prints one line
of JSON, its last. Each function imports its framework unmodified.
"""

from __future__ import annotations

import io
import json
import logging
import os
import socket
import sys
import warnings
from typing import Any

import torch


def _model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.ReLU(), torch.nn.Linear(64, 16)
    )


def _batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(64, 32), torch.randn(64, 16)


def _loss(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(x).float(), y.float())


def _linears(model: torch.nn.Module) -> list[Any]:
    import transformer_engine.pytorch as te

    return [layer for layer in model.modules() if isinstance(layer, te.Linear)]


def _histories(model: torch.nn.Module) -> list[float]:
    """The largest amax that each linear has recorded under delayed scaling; 0 for none."""
    buffers = (dict(layer.named_buffers()) for layer in _linears(model))
    return [float(named.get("amax_history_fwd", torch.zeros(1)).max()) for named in buffers]


def accelerate(kind: str = "keywords") -> dict[str, Any]:
    """Accelerate's kwargs handler; or, under ``accelerate launch``, its configuration file."""
    from accelerate import Accelerator
    from accelerate.utils import TERecipeKwargs, has_transformer_engine_layers

    handlers = [TERecipeKwargs(amax_history_len=8)] if kind == "keywords" else []
    precision = {"mixed_precision": "fp8"} if kind == "keywords" else {}
    accelerator = Accelerator(kwargs_handlers=handlers, **precision)
    data = torch.utils.data.TensorDataset(*_batch())
    loader = torch.utils.data.DataLoader(data, batch_size=64)
    model = _model()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, recipes = [], []
    for _ in range(6):
        for x, y in loader:
            loss = _loss(model, x, y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss))
    inner = accelerator.unwrap_model(model, keep_fp32_wrapper=True)
    recipes = [layer.extra_repr().rpartition("last run: ")[2] for layer in _linears(inner)]
    return {
        "fp8": accelerator.fp8_enabled and accelerator.fp8_backend.name == "TE",
        "converted": has_transformer_engine_layers(inner),
        "losses": losses,
        "ran": recipes,
    }


def lightning() -> dict[str, Any]:
    """Lightning's plug-in in Fabric and in a Trainer."""
    import lightning as L
    from lightning.fabric.plugins.precision.transformer_engine import TransformerEnginePrecision

    x, y = _batch()
    recipe = {"fp8_format": "HYBRID", "amax_history_len": 4}
    plugin = TransformerEnginePrecision(
        weights_dtype=torch.bfloat16, recipe=recipe, replace_layers=True
    )
    fabric = L.Fabric(accelerator="cpu", devices=1, plugins=plugin)
    with fabric.init_module():
        built = torch.nn.Linear(32, 32)
    model = fabric.setup_module(_model())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for _ in range(6):
        loss = _loss(model, x, y)
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))

    # A setup of both, which replaces layers whose parameters the optimizer has.
    lines = io.StringIO()
    logging.getLogger("fp8core").addHandler(logging.StreamHandler(lines))
    stale, early = _model(), L.Fabric(accelerator="cpu", devices=1, precision="transformer-engine")
    stale, idle = early.setup(stale, torch.optim.SGD(stale.parameters(), lr=0.1))
    early.backward(_loss(stale, x, y))
    idle.step()
    said = lines.getvalue()

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = _model()
            self.losses: list[float] = []

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            loss = _loss(self.model, *batch)
            self.losses.append(float(loss))
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Module()
    trainer = L.Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=6,
        precision="transformer-engine",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = torch.utils.data.TensorDataset(x, y)
    trainer.fit(module, torch.utils.data.DataLoader(data, batch_size=64))
    return {
        "built": type(built).__module__,
        "said": said,
        "fabric": losses,
        "fabric amaxes": _histories(model),
        "trainer": module.losses,
        "trainer amaxes": _histories(module),
    }


def peft() -> dict[str, Any]:
    """PEFT's LoRA layer over layers of Transformer Engine."""
    import transformer_engine.pytorch as te
    from peft import LoraConfig, get_peft_model
    from peft.tuners.lora.te import TeLinear
    from transformer_engine.common import recipe as recipes

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.up = te.LayerNormLinear(32, 64)
            self.down = te.Linear(64, 16)
            self.config = {"model_type": "custom"}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.down(torch.relu(self.up(x)))
            return output

    x, y = _batch()
    model = get_peft_model(Model(), LoraConfig(r=4, target_modules=["up", "down"]))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    frozen = model.base_model.model.down.base_layer.weight.clone()
    recipe = recipes.MXFP8BlockScaling()
    losses = []
    for _ in range(6):
        with te.fp8_autocast(fp8_recipe=recipe):
            loss = _loss(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    down = model.base_model.model.down
    return {
        "layers": [isinstance(m, TeLinear) for m in (model.base_model.model.up, down)],
        "losses": losses,
        "frozen": torch.equal(down.base_layer.weight, frozen),
        "ran": down.base_layer.extra_repr().rpartition("last run: ")[2],
    }


def deepspeed() -> dict[str, Any]:
    """DeepSpeed's test of FP8 in float32: equal losses at each stage of ZeRO, on one rank."""
    import deepspeed as engine
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe as recipes

    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="localhost")
    with socket.socket() as probe:  # a free port
        probe.bind(("localhost", 0))
        os.environ["MASTER_PORT"] = str(probe.getsockname()[1])
    engine.init_distributed(dist_backend="gloo")
    recipe = recipes.DelayedScaling(
        fp8_format=recipes.Format.HYBRID, amax_history_len=16, amax_compute_algo="max"
    )
    results: dict[str, Any] = {}
    for stage in (0, 1, 2, 3):
        torch.manual_seed(0)
        model = torch.nn.Sequential(
            *(te.Linear(32, 32, bias=True, params_dtype=torch.float32) for _ in range(3))
        )
        settings = {
            "train_batch_size": 16,
            "optimizer": {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"stage": stage},
        }
        wrapped, _, _, _ = engine.initialize(
            config=settings, model=model, model_parameters=model.parameters()
        )
        torch.manual_seed(1)
        x = torch.randn(16, 32)
        losses = []
        for _ in range(4):
            with te.fp8_autocast(enabled=True, fp8_recipe=recipe):
                loss = (wrapped(x) - x).square().mean()
            wrapped.backward(loss)
            wrapped.step()
            losses.append(float(loss))
        results[str(stage)] = losses
    return results


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # of the frameworks
    torch.set_num_threads(1)
    name, *arguments = sys.argv[1:]
    print(json.dumps(globals()[name](*arguments)))
