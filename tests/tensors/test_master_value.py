"""What masters start as."""

from __future__ import annotations

import pytest
import torch

import fp8core
from fp8core import OperandError, recipe, reporting


def stored() -> torch.nn.Module:
    torch.manual_seed(0)
    with fp8core.quantized_model_init(True, recipe.Float8CurrentScaling(), True):
        return fp8core.Linear(32, 32, params_dtype=torch.bfloat16)


def is_moved_by_a_step(net: torch.nn.Module, masters: fp8core.MasterWeights) -> bool:
    optimizer = torch.optim.SGD(masters.parameters(), lr=0.1)
    masters.attach(optimizer)
    before = [own.detach().float().clone() for own in net.parameters()]
    net(torch.ones(16, 32, dtype=torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    after = [own.detach().float() for own in net.parameters()]
    return not all(map(torch.equal, before, after))


def test_a_refused_model_keeps_its_initial_values() -> None:
    net = torch.nn.ModuleList([stored(), torch.nn.LayerNorm(4, dtype=torch.half, device="meta")])
    with pytest.raises(OperandError, match="meta"):
        fp8core.MasterWeights(net)
    assert net[0].weight.get_high_precision_init_val() is not None


def test_masters_made_in_inference_mode_can_be_stepped() -> None:
    net = torch.nn.Linear(32, 32, dtype=torch.bfloat16)
    with torch.inference_mode():
        masters = fp8core.MasterWeights(net)
    assert is_moved_by_a_step(net, masters)


def test_a_model_on_the_meta_device_is_refused() -> None:
    net = torch.nn.Linear(4, 4, dtype=torch.bfloat16, device="meta")
    with pytest.raises(OperandError, match="'weight' on the meta device"):
        fp8core.MasterWeights(net)


def test_a_step_leaves_the_initial_value_that_somebody_holds() -> None:
    with fp8core.quantized_model_init(True, recipe.Float8CurrentScaling(), True):
        net = fp8core.Linear(32, 32, params_dtype=torch.float32)
    held = net.weight.get_high_precision_init_val()
    (master, _) = fp8core.MasterWeights(net).parameters()
    assert master.data_ptr() != held.data_ptr()
    assert type(held) is torch.Tensor


def test_an_initial_value_of_before_the_checkpoint_is_not_taken(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "_logged", set())
    net, other = stored(), stored()
    with torch.no_grad():
        other.weight.mul_(3)
    net.load_state_dict(other.state_dict())
    masters = dict(fp8core.MasterWeights(net).named_parameters())
    assert torch.equal(masters["weight"], other.weight.dequantize(torch.float32))
    assert "written after its initial value was kept" in caplog.text


def test_codes_of_another_scale_are_a_start() -> None:
    # As a checkpoint of delayed scaling has them: quantizing again would give other codes.
    net = stored()
    net.weight._rowwise_data[net.weight._rowwise_data & 0x7F > 0x70] &= 0x8F
    net.weight.clear_high_precision_init_val()
    assert is_moved_by_a_step(net, fp8core.MasterWeights(net))
