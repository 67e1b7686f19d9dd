"""Files of every layout, read by the libraries that they are written for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8core
from fp8core import QuantizedTensor
from fp8core.backend_api import Operand, OperandSpec
from fp8core.checkpoints import load_pretrained, save_pretrained
from fp8core.errors import RecipeError, UnsupportedError
from fp8core.interchange.checkpoints.layouts import LAYOUTS, file_tensors, layout_of
from fp8core.plan import LayerRole
from tests.interchange.models import RECIPES, codes_of, spread, write
from tests.pairs import pairs

transformers = pytest.importorskip("transformers", minversion="5.23")
NEEDS = {"fp8": "accelerate", "compressed-tensors": "compressed_tensors"}
# Of a value, relative, between two roundings to bfloat16: one unit in the last place.
ONE_ROUNDING = 2.0**-7


@pytest.fixture(autouse=True)
def _without_their_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def llama(seed: int = 0) -> Any:
    config = transformers.LlamaConfig(
        **{"vocab_size": 64, "hidden_size": 128, "intermediate_size": 256},
        **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4},
        **{"max_position_embeddings": 32, "tie_word_embeddings": False},
    )
    torch.manual_seed(seed)
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16)


@pytest.mark.parametrize("name", RECIPES)
def test_transformers_reads_what_is_written(name: str, tmp_path: Path) -> None:
    recipe, method = RECIPES[name]
    is_compressed = "quantized" in name
    pytest.importorskip(NEEDS["compressed-tensors" if is_compressed else "fp8"])
    saved = save_pretrained(llama(), tmp_path, recipe, method=method, max_shard_size="100KB")
    assert len(saved.quantized) == 14
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours = llama(seed=1)
    load_pretrained(tmp_path, ours)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        theirs(tokens)  # compressed-tensors decompresses in the first forward
    is_exact = not is_compressed or "mxfp8" in name
    parameters = dict(theirs.named_parameters())
    for key, value in ours.named_parameters():
        other = parameters[key]
        assert other.dtype == torch.bfloat16
        if key in saved.quantized and not is_exact:
            assert torch.allclose(other.float(), value.float(), rtol=ONE_ROUNDING, atol=0), key
        else:
            assert torch.equal(other, value), key


@pytest.mark.parametrize("name", ["fp8 block", "fp8 tensor", "fp8 microscaling"])
def test_a_model_with_a_tied_head_keeps_it(name: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS["fp8"])
    source = llama()
    source.config.tie_word_embeddings = True
    source.lm_head.weight = source.model.embed_tokens.weight
    save_pretrained(source, tmp_path, RECIPES[name][0])
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert torch.equal(theirs.lm_head.weight, source.lm_head.weight)


@pytest.mark.parametrize("shape", [(256, 128), (576, 200)])
def test_torch_s_distributed_reader_reads_blocks(shape: tuple[int, int], tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.quantized_hf_storage import (
        QuantizedHuggingFaceStorageReader,
    )

    source = torch.nn.Sequential()
    source.add_module("fc", torch.nn.Linear(shape[1], shape[0], bias=False))
    save_pretrained(source, tmp_path, "block")
    ours = torch.nn.Sequential()
    ours.add_module("fc", torch.nn.Linear(shape[1], shape[0], bias=False))
    load_pretrained(tmp_path, ours)
    state = {"fc.weight": torch.empty(shape)}
    reader = QuantizedHuggingFaceStorageReader(str(tmp_path), thread_count=1)
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert torch.equal(state["fc.weight"], ours.fc.weight)


def test_a_file_of_deepseek_s_form_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    pytest.importorskip(NEEDS["fp8"])
    source = llama()
    tensors: dict[str, torch.Tensor] = {}
    for index, (key, value) in enumerate(source.state_dict().items()):
        if "layers" in key and value.dim() == 2:
            tensors[key] = codes_of(tuple(value.shape), seed=index)
            counts = [size // 128 for size in value.shape]
            tensors[f"{key}_scale_inv"] = torch.rand(counts) * 1e-3 + 1e-6
        else:
            tensors[key] = value
    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    write(tmp_path, tensors, {**config, "weight_block_size": [128, 128]})
    source.config.save_pretrained(tmp_path)
    merged = transformers.AutoConfig.from_pretrained(tmp_path)
    merged.quantization_config = {**config, "weight_block_size": [128, 128]}
    merged.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    for native in (False, True):
        ours = llama(seed=1)
        loaded = load_pretrained(tmp_path, ours, native)
        assert len(loaded.native if native else loaded.dequantized) == 14
        for key, value in theirs.named_parameters():
            own = ours.get_parameter(key)
            own = own.dequantize() if key in loaded.native else own
            assert torch.equal(own, value), key
    key = loaded.native[0]
    shape = tuple(tensors[key].shape)
    expected = tensors[key].float() * spread(tensors[f"{key}_scale_inv"], shape, (128, 128))
    assert torch.equal(ours.get_parameter(key).dequantize(), expected.bfloat16())


MIXTURES = {
    "qwen": ("Qwen2MoeConfig", "Qwen2MoeForCausalLM", "mlp", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", "block_sparse_moe", ("w1", "w3", "w2")),
}


def mixture(kind: str) -> Any:
    """Return a model of one layer with three experts."""
    options = {"vocab_size": 32, "hidden_size": 128, "intermediate_size": 128}
    options |= {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    options |= {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128}
    options |= {"num_experts": 3, "num_local_experts": 3, "num_experts_per_tok": 2}
    config_class, model_class = MIXTURES[kind][:2]
    config = getattr(transformers, config_class)(**options)
    return getattr(transformers, model_class)(config).to(torch.bfloat16)


@pytest.mark.parametrize("kind", MIXTURES)
def test_files_of_mixtures_are_read_as_transformers_reads_them(kind: str, tmp_path: Path) -> None:
    pytest.importorskip(NEEDS["fp8"])
    source, block, parts = mixture(kind), *MIXTURES[kind][2:]
    tensors: dict[str, torch.Tensor] = {}
    for index, (key, value) in enumerate(source.state_dict().items()):
        name = key.replace(".mlp.", f".{block}.")
        if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            tensors[name] = value
            continue
        names = parts[:2] if key.endswith("gate_up_proj") else parts[2:]
        for expert in range(3):
            for at, part in enumerate(names):
                stem = f"{name.rpartition('.')[0]}.{expert}.{part}.weight"
                tensors[stem] = codes_of((128, 128), seed=100 * index + 10 * expert + at)
                tensors[f"{stem}_scale_inv"] = torch.rand(1, 1) * 1e-3 + 1e-6
    fp8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    fp8["weight_block_size"] = [128, 128]
    write(tmp_path, tensors, fp8)
    source.config.quantization_config = fp8
    source.config.save_pretrained(tmp_path)
    theirs = type(source).from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours = mixture(kind)
    loaded = load_pretrained(tmp_path, ours)
    assert len(loaded.dequantized) == 2
    for key, value in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(key), value), key


@pytest.mark.parametrize(
    ("kind", "name", "is_converted"),
    pairs(MIXTURES, ["fp8 block", "fp8 tensor", "fp8 microscaling"], [False, True]),
)
def test_mixtures_are_written_as_transformers_reads_them(
    kind: str, name: str, is_converted: bool, tmp_path: Path
) -> None:
    pytest.importorskip(NEEDS["fp8"])
    source, (recipe, _) = mixture(kind), RECIPES[name]
    if is_converted:
        fp8core.convert(source, recipe)
    saved = save_pretrained(source, tmp_path, recipe)
    block, parts = MIXTURES[kind][2:]
    stem = f"model.layers.0.{block}.experts.2"
    assert {f"{stem}.{part}.weight" for part in parts} <= set(saved.quantized)
    assert f"model.layers.0.{block}.gate" in saved.high_precision
    if is_converted:
        fp8core.unconvert(source)
    theirs = type(source).from_pretrained(tmp_path, dtype=torch.bfloat16)
    ours = mixture(kind)
    load_pretrained(tmp_path, ours)
    for key, value in theirs.named_parameters():
        assert torch.equal(ours.get_parameter(key), value), key


@pytest.mark.parametrize("name", ["fp8 block", "fp8 microscaling"])
@pytest.mark.parametrize("kind", MIXTURES)
def test_a_mixture_with_the_file_s_codes_computes_as_the_one_saved(
    kind: str, name: str, tmp_path: Path
) -> None:
    source, ours = mixture(kind), mixture(kind)
    save_pretrained(source, tmp_path, RECIPES[name][0])
    loaded = load_pretrained(tmp_path, ours, native=True)
    fp8core.convert(ours, loaded.recipe)
    fp8core.convert(source, RECIPES[name][0])
    assert isinstance(ours.model.layers[0].mlp.experts.down_proj, QuantizedTensor)
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        assert torch.equal(ours(tokens).logits, source(tokens).logits)


def test_transposed_weights_are_left_in_high_precision(tmp_path: Path) -> None:
    options = {"vocab_size": 32, "n_positions": 16, "n_embd": 64, "n_layer": 1, "n_head": 2}
    source = transformers.GPT2LMHeadModel(transformers.GPT2Config(**options))
    fp8core.convert(source, "block")
    with pytest.raises(RecipeError, match="Conv1D are not stored quantized"):
        save_pretrained(source, tmp_path)


def spec_of(recipe: Any) -> OperandSpec:
    spec = recipe.plan(LayerRole(), torch.bfloat16).weight.rowwise
    assert isinstance(spec, OperandSpec)
    return spec


def test_each_recipe_has_its_layout() -> None:
    reached = {
        name: layout_of(spec_of(recipe), way).name for name, (recipe, way) in RECIPES.items()
    }
    assert reached == {
        name: name.partition(",")[0].replace("square ", "").replace("rows of 128", "block")
        for name in RECIPES
    }
    assert set(reached.values()) == {layout.name for layout in LAYOUTS}


def test_codes_that_no_reader_takes_are_refused() -> None:
    for spec in (
        OperandSpec("e5m2", (128, 128), 57344.0),
        OperandSpec("e2m1", (1, 32), 6.0, "e8m0"),
        OperandSpec("e4m3", (1, 64), 448.0, "e8m0"),
    ):
        with pytest.raises(UnsupportedError, match="none of its layouts"):
            layout_of(spec)


def test_the_other_method_is_named() -> None:
    with pytest.raises(UnsupportedError, match="method='compressed-tensors' stores them"):
        layout_of(OperandSpec("e4m3", (1, 0), 448.0), "fp8")


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(RecipeError, match="method='awq'"):
        layout_of(OperandSpec("e4m3", (0, 0), 448.0), "awq")


def test_block_scales_of_powers_of_two_are_announced() -> None:
    spec = OperandSpec("e4m3", (128, 128), 448.0, power_of_two=True)
    config = layout_of(spec).config(spec, ["head"])
    assert config == {
        **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"},
        **{"weight_block_size": [128, 128], "scale_fmt": "ue8m0"},
        **{"modules_to_not_convert": ["head"], "ignored_layers": ["head"]},
    }


@pytest.mark.parametrize("name", ["layer.weight", "mlp.fc1_weight", "experts.weight0"])
def test_the_global_scale_of_nvfp4_divides(name: str) -> None:
    spec = OperandSpec("e2m1", (1, 16), 6.0, "e4m3")
    inverse = torch.rand(1000) * 1e-3 + 1e-6
    layout = layout_of(spec)
    reciprocals = []
    for value in inverse:
        operand = Operand(
            torch.zeros(2, 8, dtype=torch.uint8),
            torch.ones(2, 1, dtype=torch.uint8),
            value.reshape(1, 1),
        )
        tensors = file_tensors(layout, name, operand, spec, (2, 16))
        reciprocals.append(torch.ones(1) / list(tensors.values())[2])
    found = torch.cat(reciprocals)
    assert torch.allclose(found, inverse, rtol=2**-23, atol=0)
