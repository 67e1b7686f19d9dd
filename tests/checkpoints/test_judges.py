"""Files of every layout, read by the libraries that they are written for."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8core.checkpoints import load_pretrained, save_pretrained
from tests.checkpoints.models import RECIPES, codes_of, spread, write

transformers = pytest.importorskip("transformers")
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
