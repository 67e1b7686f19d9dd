from __future__ import annotations

import json
import os
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fp8core
from fp8core import QuantizedTensor
from fp8core.checkpoints import load_pretrained, save_pretrained
from fp8core.errors import OperandError, RecipeError, UnsupportedError
from fp8core.interchange.checkpoints.writing import Weight, operand_of
from fp8core.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    PerLayer,
)
from fp8core.torch_ops.private import FSDP_FLATTENED
from tests.interchange.models import QUANTIZED, RECIPES, H, Model, model, tensors_of
from tests.pairs import turns
from tests.refusals import unrefused

BLOCK = Float8BlockScaling(use_f32_scales=True)


def forward_codes(layer: torch.nn.Module) -> torch.Tensor:
    """Return the codes of the weight that the last forward of ``layer`` kept."""
    (kept,) = layer._bindings.weights.scope.values()
    return kept.operands.rowwise.data


@pytest.mark.parametrize("name", RECIPES)
def test_the_file_has_the_codes_of_the_forward(name: str, tmp_path: Path) -> None:
    recipe, method = RECIPES[name]
    net = model()
    fp8core.convert(net, recipe)
    save_pretrained(net, tmp_path, method=method)
    tensors = tensors_of(tmp_path)
    with fp8core.frozen_weights(net), torch.no_grad():
        net(torch.arange(16))
        for key in QUANTIZED:
            layer = net.get_submodule(key.removesuffix(".weight"))
            codes = tensors.get(key, tensors.get(f"{key}_packed")).view(torch.uint8)
            rows, columns = codes.shape
            assert torch.equal(forward_codes(layer)[:rows, :columns], codes)


def test_what_stays_in_high_precision_is_listed(tmp_path: Path) -> None:
    net = model()
    saved = save_pretrained(net, tmp_path, BLOCK)
    left = ["embed", "blocks.0.norm", "blocks.0.gate", "lm_head"]
    assert saved.high_precision == tuple(left)
    assert saved.quantized == QUANTIZED
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["modules_to_not_convert"] == config["ignored_layers"] == left
    tensors = tensors_of(tmp_path)
    for name in ("embed.weight", "blocks.0.gate.weight", "blocks.0.experts.0.bias", "positions"):
        assert torch.equal(tensors[name], net.state_dict()[name])


def test_compressed_tensors_lists_them_as_ignored(tmp_path: Path) -> None:
    saved = save_pretrained(model(), tmp_path, "mxfp8", method="compressed-tensors")
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["ignore"] == list(saved.high_precision)


def test_a_tied_weight_is_written_once(tmp_path: Path) -> None:
    save_pretrained(model(), tmp_path, BLOCK)
    assert "lm_head.weight" not in tensors_of(tmp_path)
    save_pretrained(model(is_tied=False), tmp_path, BLOCK)
    assert "lm_head.weight" in tensors_of(tmp_path)


@pytest.mark.parametrize("limit", [1, 40_000, "30KB", "5GB"])
def test_files_have_at_most_so_many_bytes(limit: Any, tmp_path: Path) -> None:
    save_pretrained(model(), tmp_path, BLOCK, max_shard_size=limit)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    count = len(files)
    assert files == [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    tensors = tensors_of(tmp_path)
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in tensors.values())
    number = {"30KB": 30_000, "5GB": 5 * 10**9}.get(limit, limit)
    for file in files:
        names = [name for name, place in index["weight_map"].items() if place == file]
        weights = {name.partition("weight")[0] for name in names}
        assert len(weights) == 1 or sum(tensors[name].nbytes for name in names) <= number
    assert (count == 1) == (limit == "5GB")


def test_one_file_s_tensors_are_held_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def save(tensors: dict[str, torch.Tensor], *args: Any, **keywords: Any) -> None:
        events.extend(tensors)
        save_file(tensors, *args, **keywords)

    def quantize(weight: Weight) -> Any:
        events.append("quantize")
        return operand_of(weight)

    monkeypatch.setattr("safetensors.torch.save_file", save)
    monkeypatch.setattr("fp8core.interchange.checkpoints.writing.operand_of", quantize)
    save_pretrained(model(), tmp_path, BLOCK, max_shard_size=1)
    # The first weight is in its file before the second one is quantized.
    second = len(events) - 1 - events[::-1].index("quantize")
    assert events.index(QUANTIZED[0]) < second < events.index(QUANTIZED[1])


def test_an_older_checkpoint_is_replaced(tmp_path: Path) -> None:
    save_pretrained(model(), tmp_path, BLOCK, max_shard_size=1)
    (tmp_path / "tokenizer.json").write_text("{}")
    save_pretrained(model(), tmp_path, BLOCK)
    names = sorted(os.listdir(tmp_path))
    assert names == [
        *("config.json", "model-00001-of-00001.safetensors", "model.safetensors.index.json"),
        "tokenizer.json",
    ]


def test_a_failed_save_leaves_the_directory_as_it_was(tmp_path: Path) -> None:
    save_pretrained(model(), tmp_path, BLOCK)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    net = model(seed=1)
    with torch.no_grad():
        net.blocks[0].experts[1].weight[3, 3] = torch.nan
    with pytest.raises(OperandError, match=r"experts\.1\.weight' holds NaN"):
        save_pretrained(net, tmp_path, BLOCK, max_shard_size=1)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.mark.parametrize(
    ("renamed", "error"), turns(range(9), [OSError(28, "no space"), KeyboardInterrupt()])
)
def test_an_interrupted_save_leaves_the_older_checkpoint(
    renamed: int, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = torch.nn.Sequential(fp8core.Linear(64, 64), fp8core.Linear(64, 64))
    save_pretrained(net, tmp_path, "current", max_shard_size=1)
    before, replace, calls = contents(tmp_path), os.replace, 0

    def fail_once(source: Any, target: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == renamed + 1:
            raise error
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail_once)
    with torch.no_grad():
        net[0].weight.zero_()
    with pytest.raises(type(error)):
        save_pretrained(net, tmp_path, "mxfp8", max_shard_size="1MB")
    assert contents(tmp_path) == before


@pytest.mark.skipif(os.name != "posix", reason="locks of POSIX")
def test_of_two_saves_at_a_time_one_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second one begins to rename files while the first one does."""
    nets = [torch.nn.Sequential(fp8core.Linear(64, 64), fp8core.Linear(64, 64)) for _ in range(2)]
    shared, alone = tmp_path / "shared", tmp_path / "alone"
    replace, failed = os.replace, []

    def save_second() -> None:
        try:
            save_pretrained(nets[1], shared, "current", max_shard_size=1)
        except BaseException as error:  # noqa: BLE001  asserted below, as a thread's is lost
            failed.append(error)

    second = threading.Thread(target=save_second)

    def begin_second(source: Any, target: Any) -> None:
        replace(source, target)
        if threading.current_thread() is not second and not second.ident:
            second.start()
            second.join(timeout=1)

    monkeypatch.setattr(os, "replace", begin_second)
    save_pretrained(nets[0], shared, "current", max_shard_size=1)
    second.join()
    assert not failed
    save_pretrained(nets[1], alone, "current", max_shard_size=1)
    assert contents(shared) == contents(alone)


def test_files_of_other_names_stay(tmp_path: Path) -> None:
    other = tmp_path / "model_average.safetensors"
    other.write_bytes(b"another checkpoint")
    save_pretrained(torch.nn.Sequential(fp8core.Linear(64, 64)), tmp_path, "current")
    assert other.read_bytes() == b"another checkpoint"


def test_a_file_and_a_folder_in_the_way_are_named(tmp_path: Path) -> None:
    net, file = torch.nn.Sequential(fp8core.Linear(64, 64)), tmp_path / "file"
    file.touch()
    with pytest.raises(OperandError, match=r"cannot write to .*file': File exists"):
        save_pretrained(net, file, "current")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(OperandError, match=r"folders named config\.json"):
        save_pretrained(net, tmp_path, "current")
    assert sorted(os.listdir(tmp_path)) == ["config.json", "file"]


def test_a_delayed_scale_is_the_layer_s(tmp_path: Path) -> None:
    net = model()
    recipe = DelayedScaling(amax_history_len=2)
    fp8core.convert(net, recipe)
    for _ in range(2):
        net(torch.arange(16)).float().square().mean().backward()
    layer = net.blocks[0].experts[0]
    with torch.no_grad():
        layer.weight.mul_(0.25)  # the scale does not follow before the next step
    save_pretrained(net, tmp_path)
    scale = tensors_of(tmp_path)["blocks.0.experts.0.weight_scale_inv"]
    assert torch.equal(scale, 1 / layer.scale_fwd[1])
    assert not any("scale_fwd" in name or "delayed" in name for name in tensors_of(tmp_path))


def test_a_quantized_parameter_s_codes_are_the_file_s(tmp_path: Path) -> None:
    with fp8core.quantized_model_init(recipe="mxfp8"):
        net = torch.nn.Sequential(fp8core.Linear(64, 32), fp8core.LayerNormMLP(32, 64))
    saved = save_pretrained(net, tmp_path, "mxfp8")
    assert saved.quantized == ("0.weight", "1.fc1_weight", "1.fc2_weight")
    tensors = tensors_of(tmp_path)
    codes, scales = tensors["1.fc1_weight"], tensors["1.fc1_weight_scale_inv"]
    assert torch.equal(codes.view(torch.uint8), net[1].fc1_weight.stored[0].data)
    assert torch.equal(scales, net[1].fc1_weight.stored[0].scale_inv)


@pytest.mark.parametrize("name", ["fp8 tensor", "float-quantized channel", "fp8 microscaling"])
def test_parts_of_a_weight_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    recipe, method = RECIPES[name]
    net = torch.nn.Sequential(fp8core.Linear(64, 96, parameters_split=("q", "k", "v")))
    save_pretrained(net, tmp_path, recipe, method=method)
    whole = torch.cat([net[0].q_weight, net[0].k_weight, net[0].v_weight]).detach()
    spec = recipe.plan(fp8core.plan.LayerRole(), torch.float32).weight
    expected = QuantizedTensor.quantize(whole, spec)
    other = torch.nn.Sequential(fp8core.Linear(64, 96, parameters_split=("q", "k", "v")))
    load_pretrained(tmp_path, other)
    loaded = torch.cat([other[0].q_weight, other[0].k_weight, other[0].v_weight])
    assert torch.equal(loaded, expected.dequantize())


def test_a_block_over_two_parts_is_refused(tmp_path: Path) -> None:
    net = torch.nn.Sequential(fp8core.Linear(64, 96, parameters_split=("q", "k", "v")))
    with pytest.raises(UnsupportedError, match="spans two of them"):
        save_pretrained(net, tmp_path, BLOCK)


def test_a_pattern_leaves_a_layer_out(tmp_path: Path) -> None:
    net = model()
    fp8core.convert(net, BLOCK)
    assert save_pretrained(net, tmp_path, skip="experts.0").quantized == QUANTIZED[1:]
    assert save_pretrained(net, tmp_path, filter="experts.0").quantized == QUANTIZED[:1]
    assert save_pretrained(model(), tmp_path, BLOCK, filter="gate").quantized == (
        "blocks.0.gate.weight",
    )
    with pytest.raises(RecipeError, match="no layer has that"):
        save_pretrained(net, tmp_path, skip="expert.0")


def test_a_native_head_stays_in_high_precision(tmp_path: Path) -> None:
    net = torch.nn.ModuleDict({"fc": fp8core.Linear(64, 64), "lm_head": fp8core.Linear(64, 16)})
    saved = save_pretrained(net, tmp_path, BLOCK)
    assert (saved.quantized, saved.high_precision) == (("fc.weight",), ("lm_head",))


def test_uneven_sizes_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved = save_pretrained(model(), tmp_path, BLOCK)
    assert saved.uneven == QUANTIZED
    assert any("take partial blocks" in line and QUANTIZED[0] in line for line in caplog.messages)
    assert save_pretrained(model(), tmp_path, "mxfp8").uneven == ()
    assert H % 32 == 0


def test_the_wrapped_model_s_names_are_written(tmp_path: Path) -> None:
    save_pretrained(torch.compile(model(), backend="eager"), tmp_path, BLOCK)
    assert "embed.weight" in tensors_of(tmp_path)


def in_wrapper(kind: str) -> Model:
    net = model()
    if kind == "compiled":
        net.blocks[0] = torch.compile(net.blocks[0], backend="eager")
        return net
    net.blocks[0] = checkpoint_wrapper(net.blocks[0])
    if kind == "converted":
        fp8core.convert(net, BLOCK)
    return net


@pytest.mark.parametrize("kind", ["plain", "converted", "compiled"])
def test_weights_within_a_wrapper_are_quantized_and_loaded(kind: str, tmp_path: Path) -> None:
    net = in_wrapper(kind)
    saved = save_pretrained(net, tmp_path, BLOCK)
    tensors, keys = tensors_of(tmp_path), net.state_dict().keys()
    assert len(saved.quantized) == len(QUANTIZED)
    assert all(tensors[name].dtype == torch.float8_e4m3fn for name in saved.quantized)
    assert keys >= {*saved.quantized}
    assert all(any(key.startswith(name) for key in keys) for name in saved.high_precision)
    loaded = in_wrapper(kind)
    assert load_pretrained(tmp_path, loaded).dequantized == saved.quantized
    assert torch.equal(loaded.state_dict()["embed.weight"], net.state_dict()["embed.weight"])


def sharded_by_fsdp1() -> torch.nn.Module:
    net = torch.nn.Sequential(fp8core.Linear(64, 64))
    setattr(net[0].weight, FSDP_FLATTENED, True)
    return net


def computed_weight() -> torch.nn.Module:
    net = torch.nn.Sequential(fp8core.Linear(64, 64))
    torch.nn.utils.parametrizations.weight_norm(net[0])
    return net


REFUSED: dict[str, tuple[Any, Any, dict[str, Any], type[Exception], str]] = {
    "no module": (3, "block", {}, OperandError, "expected a torch.nn.Module"),
    "no recipe": (fp8core.Linear(64, 64), None, {}, RecipeError, "has no recipe"),
    "a recipe without weights": (
        torch.nn.Sequential(fp8core.Linear(64, 64)),
        PerLayer({"*": None}, default=None),
        {},
        RecipeError,
        "quantizes no weight",
    ),
    "no size": (model(), "block", {"max_shard_size": "big"}, RecipeError, "max_shard_size='big'"),
    "a method without the layout": (
        model(),
        "nvfp4",
        {"method": "fp8"},
        UnsupportedError,
        "stores",
    ),
    "a shard of FSDP1": (sharded_by_fsdp1(), "block", {}, UnsupportedError, "is sharded over"),
    "a computed weight": (computed_weight(), "block", {}, UnsupportedError, "parametrization"),
    "a model on meta": (
        torch.nn.Sequential(torch.nn.Linear(64, 64, device="meta")),
        "block",
        {},
        UnsupportedError,
        "meta",
    ),
    "a share of a weight": (
        torch.nn.Sequential(
            fp8core.Linear(64, 64, tp_size=2, parallel_mode="column", device="cpu")
        ),
        "block",
        {},
        UnsupportedError,
        "one rank's share of a column-parallel weight",
    ),
    "two layouts": (
        torch.nn.Sequential(fp8core.Linear(64, 64, name="a"), fp8core.Linear(64, 64, name="b")),
        PerLayer({"a": MXFP8BlockScaling()}, default=Float8CurrentScaling()),
        {},
        UnsupportedError,
        "one layout",
    ),
    "an odd number of columns": (
        torch.nn.Sequential(fp8core.Linear(15, 16)),
        NVFP4BlockScaling(),
        {},
        UnsupportedError,
        "15 columns",
    ),
}


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    table = {
        name: (partial(save_pretrained, net, tmp_path, recipe, **options), kind, words)
        for name, (net, recipe, options, kind, words) in REFUSED.items()
    }
    assert unrefused(table) == {}
    assert not list(tmp_path.iterdir())
