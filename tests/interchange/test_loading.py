from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fp8core
from fp8core import QuantizedTensor
from fp8core.checkpoints import load_pretrained, load_quantized, save_pretrained
from fp8core.errors import OperandError, UnsupportedError
from fp8core.interchange.checkpoints import reading
from fp8core.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    Recipe,
    WeightOnly,
)
from tests.interchange.models import (
    QUANTIZED,
    RECIPES,
    Model,
    codes_of,
    model,
    spread,
    tensors_of,
    write,
)
from tests.pairs import pairs, turns
from tests.ranks import run_ranks

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
BLOCKS = {**FP8, "weight_block_size": [128, 128]}
E4M3 = torch.float8_e4m3fn


def loaded_into(directory: Path, native: bool = False, **options: Any) -> Any:
    net = model(seed=1, **options)
    return net, load_pretrained(directory, net, native)


def scheme(**weights: Any) -> dict[str, Any]:
    fields = {"num_bits": 8, "type": "float", "symmetric": True, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": fields}}
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize(
    ("name", "dtype"), turns(RECIPES, [torch.bfloat16, torch.bfloat16, torch.float32])
)
def test_values_are_codes_times_scales(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    recipe, method = RECIPES[name]
    source = model(dtype=dtype)
    save_pretrained(source, tmp_path, recipe, method=method)
    net, loaded = loaded_into(tmp_path, dtype=dtype)
    assert loaded.dequantized == QUANTIZED
    plan = recipe.plan(fp8core.plan.LayerRole(), dtype).weight
    for key, value in net.state_dict().items():
        expected = source.state_dict()[key]
        if key in QUANTIZED:
            expected = QuantizedTensor.quantize(expected, plan).dequantize()
            if "nvfp4" in name:  # the file has the reciprocal of the tensor's scale
                assert torch.allclose(value, expected, rtol=2**-7, atol=0)
                continue
        assert torch.equal(value, expected), key


@pytest.mark.parametrize("name", RECIPES)
def test_native_codes_are_the_file_s_and_the_forward_multiplies_them(
    name: str, tmp_path: Path
) -> None:
    recipe, method = RECIPES[name]
    save_pretrained(model(), tmp_path, recipe, method=method)
    tensors = tensors_of(tmp_path)
    net, loaded = loaded_into(tmp_path, native=True)
    dequantized, _ = loaded_into(tmp_path)
    assert loaded.native == QUANTIZED
    for key in QUANTIZED:
        weight = net.get_parameter(key)
        assert isinstance(weight, QuantizedTensor)
        codes = tensors.get(key, tensors.get(f"{key}_packed")).view(torch.uint8)
        assert torch.equal(weight.stored[0].data, codes)
        assert torch.equal(weight.dequantize(), dequantized.get_parameter(key))
    tokens = torch.arange(16)
    with torch.no_grad():
        assert torch.equal(net(tokens), dequantized(tokens))  # torch's layers dequantize
        source = model()
        fp8core.convert(source, recipe)
        fp8core.convert(net, loaded.recipe)
        if "nvfp4" not in name:  # its tensor's scale went through a reciprocal
            assert torch.equal(net(tokens), source(tokens))
    net(tokens).float().square().mean().backward()
    assert net.embed.weight.grad.isfinite().all()


def test_tied_weights_are_loaded_and_stay_tied(tmp_path: Path) -> None:
    save_pretrained(model(), tmp_path, "block")
    net, _ = loaded_into(tmp_path)
    assert net.lm_head.weight is net.embed.weight
    assert torch.equal(net.embed.weight, model().embed.weight)


@pytest.mark.parametrize("is_equal", [True, False])
def test_one_tensor_of_two_values_in_the_file_is_named(
    is_equal: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = torch.nn.Module()
    other.first, other.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
    if is_equal:
        other.second.load_state_dict(other.first.state_dict())
    save_file(other.state_dict(), tmp_path / "model.safetensors")
    tied = torch.nn.Module()
    tied.first = tied.second = torch.nn.Linear(8, 8)
    load_pretrained(tmp_path, tied)
    assert torch.equal(tied.second.weight, other.first.weight)
    lines = [line for line in caplog.messages if "one tensor of the model" in line]
    assert len(lines) == (0 if is_equal else 2)
    assert all("the values of 'first." in line for line in lines)


def test_a_model_on_meta_gets_its_memory(tmp_path: Path) -> None:
    save_pretrained(model(), tmp_path, "block")
    with torch.device("meta"):
        net = Model().to(torch.bfloat16)
    net.positions = torch.empty(4, dtype=torch.int64)
    loaded = load_pretrained(tmp_path, net)
    assert not any(value.is_meta for value in net.state_dict().values())
    assert net.lm_head.weight is net.embed.weight
    expected, _ = loaded_into(tmp_path)
    assert torch.equal(net(torch.arange(4)), expected(torch.arange(4)))
    assert loaded.dequantized == QUANTIZED


def test_an_optimizer_goes_on_training_the_parameters(tmp_path: Path) -> None:
    save_pretrained(model(), tmp_path, "block")
    net = model(seed=1)
    before = [id(parameter) for parameter in net.parameters()]
    load_pretrained(tmp_path, net)
    assert [id(parameter) for parameter in net.parameters()] == before


def test_delayed_state_starts_fresh(tmp_path: Path) -> None:
    save_pretrained(model(), tmp_path, "block")
    net = model(seed=1)
    fp8core.convert(net, "delayed")
    net(torch.arange(16)).float().sum().backward()
    layer = net.blocks[0].experts[0]
    assert hasattr(layer, "scale_fwd")
    load_pretrained(tmp_path, net)
    assert not hasattr(layer, "scale_fwd")


def test_a_plain_checkpoint_loads(tmp_path: Path) -> None:
    source = model(is_tied=False)
    write(tmp_path, source.state_dict())
    net, loaded = loaded_into(tmp_path, is_tied=False)
    assert loaded == (type(loaded))((), (), None, ())
    assert torch.equal(net.lm_head.weight, source.lm_head.weight)


def test_one_file_needs_no_index(tmp_path: Path) -> None:
    write(tmp_path, model(is_tied=False).state_dict())
    (tmp_path / "model.safetensors.index.json").unlink()
    loaded_into(tmp_path, is_tied=False)


# --- files as others write them: [16, k] or so, of which one weight is quantized ---


class One(torch.nn.Module):
    def __init__(self, rows: int, columns: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(columns, rows, bias=False, dtype=dtype)


def read_one(
    directory: Path, tensors: dict[str, torch.Tensor], config: Any, native: bool = False
) -> tuple[torch.Tensor, Recipe | None]:
    codes = next(value for name, value in tensors.items() if value.dtype == E4M3)
    net = One(*codes.shape)
    loaded = load_pretrained(write(directory, tensors, config), net, native)
    return net.fc.weight, loaded.recipe


SCALE = torch.tensor([[0.25, 3.0], [1.5, 2.0], [0.1, 0.3], [7.0, 1e-4], [0.6, 0.7]])


@pytest.mark.parametrize(
    ("key", "dtype"),
    turns(
        ["weight_scale_inv", "weight_scale", "scale", "qscale_weight"],
        [torch.float32, torch.bfloat16, torch.float16],
    ),
)
def test_deepseek_s_files_are_read(key: str, dtype: torch.dtype, tmp_path: Path) -> None:
    codes, scale = codes_of((576, 200)), SCALE.to(dtype)  # no multiple of 128
    weight, recipe = read_one(tmp_path, {"fc.weight": codes, f"fc.{key}": scale}, BLOCKS)
    expected = codes.float() * spread(scale, (576, 200), (128, 128))
    assert torch.equal(weight, expected.to(torch.bfloat16))
    assert recipe == Float8BlockScaling(use_f32_scales=True)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_of_a_byte_are_exponents(dtype: torch.dtype, tmp_path: Path) -> None:
    codes = codes_of((256, 128))
    exponents = torch.tensor([[121], [130]], dtype=torch.uint8)
    tensors = {"fc.weight": codes, "fc.weight_scale_inv": exponents.view(dtype)}
    config = {**BLOCKS, "scale_fmt": "ue8m0"}
    weight, recipe = read_one(tmp_path, tensors, config, native=True)
    expected = codes.float() * spread(torch.tensor([[2.0**-6], [8.0]]), (256, 128), (128, 128))
    assert torch.equal(weight.dequantize(), expected.to(torch.bfloat16))
    assert recipe == Float8BlockScaling()


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_a_scale_for_the_tensor_has_any_number_of_dimensions(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    codes, scale = codes_of((32, 48)), torch.full(shape, 0.3)
    tensors = {"fc.weight": codes, "fc.weight_scale_inv": scale}
    weight, recipe = read_one(tmp_path, tensors, {**FP8, "weight_block_size": None})
    assert torch.equal(weight, (codes.float() * 0.3).to(torch.bfloat16))
    assert recipe == Float8CurrentScaling()


@pytest.mark.parametrize("shape", [(32,), (32, 1)])
@pytest.mark.parametrize("config", [{**FP8, "weight_block_size": None}, scheme(strategy="channel")])
def test_a_scale_for_each_row_has_one_or_two_dimensions(
    shape: tuple[int, ...], config: Any, tmp_path: Path
) -> None:
    codes, scale = codes_of((32, 48)), torch.rand(shape) + 0.1
    weight, recipe = read_one(tmp_path, {"fc.weight": codes, "fc.weight_scale": scale}, config)
    assert torch.equal(weight, (codes.float() * scale.reshape(32, 1)).to(torch.bfloat16))
    assert isinstance(recipe, Float8RowwiseScaling)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_microscaling_is_read_from_bytes_and_from_powers_of_two(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    codes = codes_of((32, 64))
    exponents = torch.randint(0, 254, (32, 2), dtype=torch.uint8)
    exponents[0] = torch.tensor([0, 254])
    values = torch.ldexp(torch.ones(32, 2, dtype=torch.float64), exponents.double() - 127).float()
    scale = exponents if dtype == torch.uint8 else values
    config = {**FP8, "weight_block_size": [1, 32]}
    tensors = {"fc.weight": codes, "fc.weight_scale_inv": scale}
    weight, recipe = read_one(tmp_path, tensors, config, native=True)
    assert torch.equal(weight.stored[0].scale_inv, exponents)
    expected = codes.float() * spread(values, (32, 64), (1, 32))
    assert torch.equal(weight.dequantize(), expected.to(torch.bfloat16))
    assert isinstance(recipe, MXFP8BlockScaling)


def test_powers_of_two_that_a_byte_does_not_have_are_dequantized(tmp_path: Path) -> None:
    codes, scale = codes_of((32, 64)), torch.full((32, 2), 2.0**-130)
    config = {**FP8, "weight_block_size": [1, 32]}
    tensors = {"fc.weight": codes, "fc.weight_scale_inv": scale}
    weight, recipe = read_one(tmp_path, tensors, config)
    assert torch.equal(weight, (codes.float() * 2.0**-130).to(torch.bfloat16))
    assert recipe is None
    with pytest.raises(UnsupportedError, match="no recipe multiplies e4m3 in blocks"):
        read_one(tmp_path, tensors, config, native=True)


def test_any_other_block_is_dequantized(tmp_path: Path) -> None:
    codes, scale = codes_of((100, 70)), torch.rand(2, 3) + 0.1
    config = {**FP8, "weight_block_size": [64, 32]}
    weight, recipe = read_one(tmp_path, {"fc.weight": codes, "fc.weight_scale_inv": scale}, config)
    assert torch.equal(weight, (codes.float() * spread(scale, (100, 70), (64, 32))).bfloat16())
    assert recipe is None


def test_a_partial_block_of_microscaling_is_dequantized(tmp_path: Path) -> None:
    codes, scale = codes_of((4, 40)), torch.tensor([[127, 120]] * 4, dtype=torch.uint8)
    tensors = {"fc.weight": codes, "fc.weight_scale": scale}
    config = scheme(strategy="group", group_size=32)
    weight, _ = read_one(tmp_path, tensors, config)
    values = torch.tensor([[1.0, 2.0**-7]] * 4)
    assert torch.equal(weight, (codes.float() * spread(values, (4, 40), (1, 32))).bfloat16())


def test_e5m2_codes_are_dequantized(tmp_path: Path) -> None:
    codes = torch.randn(32, 32).to(torch.float8_e5m2)
    tensors = {"fc.weight": codes, "fc.weight_scale_inv": torch.tensor(0.5)}
    net = One(32, 32)
    load_pretrained(write(tmp_path, tensors, {**FP8, "fmt": "e5m2"}), net)
    assert torch.equal(net.fc.weight, (codes.float() * 0.5).bfloat16())


def test_a_global_scale_of_integers_is_refused(tmp_path: Path) -> None:
    tensors = {
        "fc.weight_packed": torch.zeros(32, 16, dtype=torch.uint8),
        "fc.weight_scale": torch.ones(32, 2).to(torch.float8_e4m3fn),
        "fc.weight_global_scale": torch.ones(1, dtype=torch.int32),
    }
    weights = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
    config = {"quant_method": "compressed-tensors", "config_groups": {"all": {"weights": weights}}}
    with pytest.raises(OperandError, match=r"a global scale in torch\.int32"):
        load_pretrained(write(tmp_path, tensors, config), One(32, 32))


def test_scales_of_zero_belong_to_zeros(tmp_path: Path) -> None:
    tensors = {
        "fc.weight": torch.zeros(32, 32).to(E4M3),
        "fc.weight_scale_inv": torch.zeros(1, 1),
    }
    weight, _ = read_one(tmp_path, tensors, BLOCKS)
    assert not weight.any()


def test_activation_scales_are_named_and_not_read(tmp_path: Path) -> None:
    tensors = {
        **{"fc.weight": codes_of((32, 32)), "fc.weight_scale": torch.tensor([0.5])},
        "fc.input_scale": torch.tensor(2.0),
    }
    loaded = load_pretrained(write(tmp_path, tensors, scheme(strategy="tensor")), One(32, 32))
    assert loaded.unread == ("fc.input_scale",)


class Experts(torch.nn.Module):
    def __init__(self, rows: int = 256) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.zeros(3, rows, 128, dtype=torch.bfloat16))


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("rows", [256, 200])
def test_weights_of_experts_have_three_dimensions(rows: int, native: bool, tmp_path: Path) -> None:
    codes, scale = codes_of((3, rows, 128)), torch.rand(3, 2, 1) + 0.1
    tensors = {"gate_up_proj": codes, "gate_up_proj_scale_inv": scale}
    net = Experts(rows)
    loaded = load_pretrained(write(tmp_path, tensors, BLOCKS), net, native)
    matrices = [codes[i].float() * spread(scale[i], (rows, 128), (128, 128)) for i in range(3)]
    weight = net.gate_up_proj
    assert isinstance(weight, QuantizedTensor) == (native and rows == 256)
    assert bool(loaded.native) == isinstance(weight, QuantizedTensor)
    values = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
    assert torch.equal(values, torch.stack(matrices).bfloat16())


def test_a_saved_checkpoint_saves_the_same_codes_again(tmp_path: Path) -> None:
    save_pretrained(model(), tmp_path / "a", "block")
    net, loaded = loaded_into(tmp_path / "a", native=True)
    save_pretrained(net, tmp_path / "b", loaded.recipe)
    first, second = tensors_of(tmp_path / "a"), tensors_of(tmp_path / "b")
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype
        width = torch.uint8 if value.dtype == E4M3 else value.dtype
        assert torch.equal(value.view(width), second[name].view(width))


class Mixture(torch.nn.Module):
    """Experts as transformers 5 holds them."""

    def __init__(self, width: int = 128, inner: int = 256) -> None:
        super().__init__()
        self.mlp = torch.nn.Module()
        self.mlp.experts = torch.nn.Module()
        for name, size in (("gate_up_proj", (2 * inner, width)), ("down_proj", (width, inner))):
            value = torch.zeros(3, *size, dtype=torch.bfloat16)
            self.mlp.experts.register_parameter(name, torch.nn.Parameter(value))
        self.layers = torch.nn.ModuleList([torch.nn.Module()])
        self.layers[0].mlp = self.mlp
        del self.mlp


NAMES = {
    "qwen": ("layers.0.mlp.experts", "gate_proj", "up_proj", "down_proj"),
    "mixtral": ("layers.0.block_sparse_moe.experts", "w1", "w3", "w2"),
}


def expert_files(names: tuple[str, ...], inner: int = 256) -> dict[str, torch.Tensor]:
    """Return the tensors of three experts under ``names``, one for each linear of each."""
    prefix, gate, up, down = names
    tensors = {}
    for expert in range(3):
        sizes = ((gate, (inner, 128)), (up, (inner, 128)), (down, (128, inner)))
        for at, (name, shape) in enumerate(sizes):
            stem = f"{prefix}.{expert}.{name}.weight"
            tensors[stem] = codes_of(shape, seed=10 * expert + at)
            counts = [-(-size // 128) for size in shape]
            tensors[f"{stem}_scale_inv"] = torch.rand(counts) * 1e-2 + 1e-4
    return tensors


@pytest.mark.parametrize(
    ("kind", "native", "inner", "device"), pairs(NAMES, [False, True], [256, 192], ["cpu", "meta"])
)
def test_experts_stored_one_by_one_are_read_into_one_parameter(
    kind: str, native: bool, inner: int, device: str, tmp_path: Path
) -> None:
    prefix, *parts = NAMES[kind]
    tensors = expert_files(NAMES[kind], inner)
    net = Mixture(inner=inner).to(device)
    loaded = load_pretrained(write(tmp_path, tensors, BLOCKS), net, native)
    held = dict(net.named_parameters())
    kept = {name for name, value in held.items() if isinstance(value, QuantizedTensor)}
    # Where a block spans gate and up, these have scales of their own.
    whole = {*held} if inner == 256 else {"layers.0.mlp.experts.down_proj"}
    assert kept == set(loaded.native) == (whole if native else set())

    def value(expert: int, part: str) -> torch.Tensor:
        codes = tensors[f"{prefix}.{expert}.{part}.weight"]
        scale = tensors[f"{prefix}.{expert}.{part}.weight_scale_inv"]
        return (codes.float() * spread(scale, tuple(codes.shape), (128, 128))).bfloat16()

    for expert in range(3):
        gate_up = torch.cat([value(expert, parts[0]), value(expert, parts[1])])
        for name, expected in (("gate_up_proj", gate_up), ("down_proj", value(expert, parts[2]))):
            weight = held[f"layers.0.mlp.experts.{name}"]
            plain = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
            assert torch.equal(plain[expert], expected)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    tensors = expert_files(NAMES["qwen"])
    for end in ("", "_scale_inv"):
        del tensors[f"layers.0.mlp.experts.1.up_proj.weight{end}"]
    net = Mixture()
    with pytest.raises(OperandError, match=r"lacks layers\.0\.mlp\.experts\.1\.up_proj\.weight,"):
        load_pretrained(write(tmp_path, tensors, BLOCKS), net)
    assert not any(value.any() for value in net.parameters())


def test_experts_in_high_precision_are_read_one_by_one(tmp_path: Path) -> None:
    tensors = expert_files(NAMES["qwen"])
    plain = {name: one.float() for name, one in tensors.items() if "scale" not in name}
    net = Mixture()
    load_pretrained(write(tmp_path, plain), net)
    first = net.get_parameter("layers.0.mlp.experts.down_proj")[2]
    assert torch.equal(first, plain["layers.0.mlp.experts.2.down_proj.weight"].bfloat16())


# --- a model that FSDP2 has spread over two ranks ---


class DownProjections(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.Module()
        weight = torch.zeros(3, 128, 128, dtype=torch.bfloat16)
        self.experts.down_proj = torch.nn.Parameter(weight)


def load_share(rank: int, folder: str, experts: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    net = model(seed=1)
    for expert in net.blocks[0].experts:
        fully_shard(expert, mesh=mesh)
    fully_shard(net, mesh=mesh)
    loaded = load_pretrained(folder, net)
    values = {name: one.full_tensor() for name, one in net.named_parameters()}
    sizes = {name: one.to_local().numel() for name, one in net.named_parameters()}
    mixture = DownProjections()
    fully_shard(mixture, mesh=mesh)
    load_pretrained(experts, mixture)
    values["experts"] = mixture.experts.down_proj.full_tensor()
    return {"values": values, "sizes": sizes, "dequantized": list(loaded.dequantized)}


def test_each_rank_reads_its_share(tmp_path: Path) -> None:
    folder, experts = tmp_path / "model", tmp_path / "experts"
    save_pretrained(model(), folder, "block")
    tensors = {}
    for expert in range(3):
        name = f"experts.{expert}.down_proj.weight"
        tensors[name] = codes_of((128, 128), seed=expert)
        tensors[f"{name}_scale_inv"] = torch.full((1, 1), 0.5)
    write(experts, tensors, BLOCKS)
    whole = model(seed=1)
    load_pretrained(folder, whole)
    mixture = DownProjections()
    load_pretrained(experts, mixture)
    expected = {**dict(whole.named_parameters()), "experts": mixture.experts.down_proj}
    ranks = run_ranks(load_share, tmp_path, str(folder), str(experts))
    for result in ranks:
        assert result["dequantized"] == list(QUANTIZED)
        for name, value in result["values"].items():
            assert torch.equal(value, expected[name]), name
    for name, size in ranks[0]["sizes"].items():
        assert size + ranks[1]["sizes"][name] == expected[name].numel()


class Two(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(32, 32, bias=False, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(32, 32, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.fc(x))
        return result


def on_meta(make: Any) -> Any:
    with torch.device("meta"):
        return make()


@pytest.mark.parametrize("name", RECIPES)
def test_codes_go_straight_into_a_model_for_inference(name: str, tmp_path: Path) -> None:
    recipe, method = RECIPES[name]
    source = model()
    save_pretrained(source, tmp_path, recipe, method=method)
    net = on_meta(lambda: model(seed=1))
    report = load_quantized(tmp_path, net, device="cpu")
    assert report.stored == QUANTIZED
    assert "backward_override" not in report.recipe
    assert not any(parameter.requires_grad for parameter in net.parameters())
    native, loaded = loaded_into(tmp_path, native=True)
    chosen = WeightOnly(loaded.recipe) if "nvfp4" in name else loaded.recipe
    fp8core.convert(native, chosen)
    tokens = torch.arange(16)
    with torch.no_grad():
        assert torch.equal(net(tokens), native(tokens))
    for key in QUANTIZED:
        assert net.get_parameter(key).get_usages() == {"rowwise": True, "columnwise": False}


def test_a_tie_that_accelerate_undid_is_made_again(tmp_path: Path) -> None:
    save_pretrained(model(), tmp_path, "block")
    with accelerate.init_empty_weights():
        net: Any = model(seed=1)
    assert net.lm_head.weight is not net.embed.weight
    net.tie_weights = lambda: setattr(net.lm_head, "weight", net.embed.weight)
    load_quantized(tmp_path, net, device="cpu")
    assert net.lm_head.weight is net.embed.weight
    assert torch.equal(net.embed.weight, model().embed.weight)


def static_checkpoint(folder: Path, scale: float = 0.25) -> Path:
    tensors = {
        "fc.weight": codes_of((32, 32)),
        "fc.weight_scale": torch.tensor([0.5]),
        "fc.input_scale": torch.tensor(scale),
        "head.weight": torch.randn(32, 32, dtype=torch.bfloat16),
    }
    return write(folder, tensors, scheme(strategy="tensor"))


def test_static_scales_of_activations_are_used_and_stay(tmp_path: Path) -> None:
    net, x = Two(), torch.randn(4, 32, dtype=torch.bfloat16) * 50
    report = load_quantized(static_checkpoint(tmp_path), net)
    assert report.stored == ("fc.weight",)  # the head is in high precision in the file
    assert report.recipe == "DelayedScaling()"
    weight = net.fc.weight.dequantize().float()
    codes = (x.float() / 0.25).clamp(-448, 448).to(E4M3).float() * 0.25
    expected = torch.nn.functional.linear(codes, weight).to(torch.bfloat16)
    for _ in range(2):  # with gradients on, too
        assert torch.equal(net.fc(x), expected)
    assert not torch.equal(codes, x.float())


def test_weights_alone_are_read_as_the_config_says(tmp_path: Path) -> None:
    config = scheme(strategy="channel")
    config["config_groups"]["group_0"]["input_activations"] = None
    tensors = {
        "fc.weight": codes_of((32, 32)),
        "fc.weight_scale": torch.rand(32, 1) + 0.5,
        "head.weight": torch.randn(32, 32, dtype=torch.bfloat16),
    }
    net, x = Two(), torch.randn(4, 32, dtype=torch.bfloat16)
    load_quantized(write(tmp_path, tensors, config), net)
    weight = tensors["fc.weight"].view(E4M3).float() * tensors["fc.weight_scale"]
    expected = torch.nn.functional.linear(x.float(), weight).to(torch.bfloat16)
    torch.testing.assert_close(net.fc(x), expected)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -1.0, 1e-45])
def test_a_scale_of_activations_that_is_none_is_refused(value: float, tmp_path: Path) -> None:
    net, x = Two(), torch.randn(4, 32, dtype=torch.bfloat16)
    expected = net(x)
    static_checkpoint(tmp_path, value)
    with pytest.raises(OperandError, match=r"'fc.input_scale' is .*Nothing was loaded"):
        load_quantized(tmp_path, net)
    assert torch.equal(net(x), expected)


def test_activations_of_some_layers_alone_are_refused(tmp_path: Path) -> None:
    path = static_checkpoint(tmp_path) / "config.json"
    config = json.loads(path.read_text())
    groups = config["quantization_config"]["config_groups"]
    groups["group_1"] = {**groups["group_0"], "input_activations": None}
    path.write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match="the activations of some layers"):
        load_quantized(tmp_path, Two())
    load_pretrained(tmp_path, Two())


def stepped(net: Two) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters())


def differentiated(net: Two) -> None:
    net(torch.ones(1, 32, dtype=torch.bfloat16)).sum().backward()


@pytest.mark.parametrize(("use", "named"), [(stepped, "SGD"), (differentiated, "gradients")])
def test_a_model_in_training_is_refused_as_it_is(use: Any, named: str, tmp_path: Path) -> None:
    net, x = Two(), torch.randn(4, 32, dtype=torch.bfloat16)
    expected, used = net(x), use(net)
    with pytest.raises(OperandError, match=rf"load_quantized\(.*{named}"):
        load_quantized(static_checkpoint(tmp_path), net)
    assert type(net.fc) is torch.nn.Linear
    assert net.training
    assert torch.equal(net(x), expected)
    del used


def test_layers_that_share_codes_compute_alike(tmp_path: Path) -> None:
    net, x = Two(), torch.randn(4, 32, dtype=torch.bfloat16)
    net.head.weight = net.fc.weight
    tensors = {"fc.weight": codes_of((32, 32)), "fc.weight_scale": torch.tensor([0.5])}
    report = load_quantized(write(tmp_path, tensors, scheme(strategy="tensor")), net)
    assert report.stored == ("fc.weight", "head.weight")
    assert not report.high_precision
    assert net.fc.weight is net.head.weight
    native = Two()
    native.head.weight = native.fc.weight
    loaded = load_pretrained(tmp_path, native, native=True)
    fp8core.convert(native, loaded.recipe, filter=lambda module, path: True)
    with torch.no_grad():
        assert torch.equal(net(x), native(x))
        assert torch.equal(net.fc(x), net.head(x))


def test_a_model_whose_codes_cannot_be_stored_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(model: torch.nn.Module) -> None:
        raise UnsupportedError("no backend")

    monkeypatch.setattr(reading, "quantize_", refused)
    net = Two()
    with pytest.raises(UnsupportedError, match="no backend"):
        load_quantized(static_checkpoint(tmp_path), net)
    with pytest.raises(OperandError, match="was interrupted"):
        net(torch.randn(4, 32, dtype=torch.bfloat16))


@pytest.mark.parametrize("load", [load_pretrained, load_quantized])
@pytest.mark.parametrize("device", ["meta", "nowhere"])
def test_a_device_without_values_is_refused(load: Any, device: str, tmp_path: Path) -> None:
    net = on_meta(Two)
    with pytest.raises((OperandError, RuntimeError), match="device"):
        load(static_checkpoint(tmp_path), net, device=device)
    assert all(parameter.is_meta for parameter in net.parameters())
    assert not net.fc._forward_pre_hooks


def test_a_buffer_on_meta_that_no_file_has_is_named(tmp_path: Path) -> None:
    net = on_meta(Two)
    net.fc.register_buffer("angles", torch.empty(2, device="meta"), persistent=False)
    static_checkpoint(tmp_path)
    with pytest.raises(OperandError, match=r"fc.angles are buffers on meta"):
        load_quantized(tmp_path, net, device="cpu")
    net.fc.angles = torch.ones(2)
    load_quantized(tmp_path, net, device="cpu")


def test_files_without_codes_are_refused(tmp_path: Path) -> None:
    write(tmp_path, {k: v.detach() for k, v in Two().state_dict().items()}, None)
    with pytest.raises(OperandError, match="the files hold no codes"):
        load_quantized(tmp_path, Two())


@pytest.mark.parametrize("load", [load_pretrained, load_quantized])
def test_an_interrupted_load_leaves_no_model_that_answers(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = Two(), torch.randn(4, 32, dtype=torch.bfloat16)
    static_checkpoint(tmp_path)

    def interrupted(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(reading, "_fill", interrupted)  # of the head, which is in high precision
        with pytest.raises(KeyboardInterrupt):
            load(tmp_path, net)
    for part in (net.fc, net.head):
        with pytest.raises(OperandError, match=r"load_.*was interrupted"):
            part(x)
    load(tmp_path, net)
    with torch.no_grad():
        assert net(x).isfinite().all()
