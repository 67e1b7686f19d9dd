"""A checkpoint that does not fit is a named error, and the model stays as it was."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import fp8core
from fp8core.checkpoints import load_pretrained, save_pretrained
from fp8core.errors import Fp8CoreError, OperandError, UnsupportedError
from tests.interchange.models import Model, model, tensors_of

INDEX = "model.safetensors.index.json"
WEIGHT = "blocks.0.experts.0.weight"
SCALES = [f"{WEIGHT}_scale_inv"]


def edit(change: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Return a change of the tensors of a checkpoint."""

    def run(directory: Path) -> None:
        tensors = tensors_of(directory)
        change(tensors)
        for file in directory.glob("*.safetensors"):
            file.unlink()
        save_file(tensors, directory / "model-1.safetensors", metadata={"format": "pt"})
        places = dict.fromkeys(tensors, "model-1.safetensors")
        (directory / INDEX).write_text(json.dumps({"weight_map": places}))

    return run


def configure(**fields: Any) -> Callable[[Path], None]:
    """Return a change of the quantization_config."""

    def run(directory: Path) -> None:
        path = directory / "config.json"
        content = json.loads(path.read_text())
        content["quantization_config"].update(fields)
        path.write_text(json.dumps(content))

    return run


def one_shard(action: Callable[[Path], object]) -> Callable[[Path], None]:
    return lambda directory: action(sorted(directory.glob("*.safetensors"))[2]) and None


def header_bytes(old: bytes, new: bytes) -> Callable[[Path], None]:
    """Return a change of the headers of all files, which stay as long as they are."""

    def run(directory: Path) -> None:
        for path in directory.glob("*.safetensors"):
            path.write_bytes(path.read_bytes().replace(old, new))

    return run


def replace_text(name: str, text: str) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_text(text)


def in_the_place_of(name: str, action: Callable[[Path], object]) -> Callable[[Path], None]:
    """Return a change of the file ``name`` to what ``action`` puts there."""

    def run(directory: Path) -> None:
        (directory / name).unlink()
        action(directory / name)

    return run


def remap(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def run(directory: Path) -> None:
        index = json.loads((directory / INDEX).read_text())
        change(index["weight_map"])
        (directory / INDEX).write_text(json.dumps(index))

    return run


def scale(value: torch.Tensor) -> Callable[[Path], None]:
    return edit(lambda tensors: tensors.update({f"{WEIGHT}_scale_inv": value}))


def groups(**weights: Any) -> Callable[[Path], None]:
    return configure(
        quant_method="compressed-tensors", config_groups={"group_0": {"weights": weights}}
    )


BAD: dict[str, tuple[Callable[[Path], object], type[Fp8CoreError], str]] = {
    "a missing shard": (one_shard(Path.unlink), OperandError, r"missing model-00003-of-\d+\.safe"),
    "a shard cut off": (
        one_shard(lambda path: path.write_bytes(path.read_bytes()[:-100])),
        OperandError,
        r"model-00003-of-\d+\.safetensors is damaged or cut off",
    ),
    "an empty shard": (one_shard(lambda path: path.write_bytes(b"")), OperandError, "damaged"),
    "a header of another size": (
        one_shard(lambda path: path.write_bytes(b"\xff" * 8 + path.read_bytes()[8:])),
        OperandError,
        "damaged",
    ),
    "a shard of another checkpoint": (
        one_shard(lambda path: save_file({"other": torch.ones(1)}, path)),
        OperandError,
        "holds 'other', which",
    ),
    "an index of more": (
        remap(lambda places: places.update(more=next(iter(places.values())))),
        OperandError,
        "lists more, which its files do not hold",
    ),
    "an index to another directory": (
        remap(lambda places: places.update(more="../other.safetensors")),
        OperandError,
        "no weight_map of tensors to files beside it",
    ),
    "an index to a name too long": (
        replace_text(INDEX, json.dumps({"weight_map": {WEIGHT: "x" * 5000}})),
        OperandError,
        "missing xxx",
    ),
    "an index that is no JSON": (replace_text(INDEX, "{"), OperandError, "cannot be read"),
    "an index of nesting": (replace_text(INDEX, "[" * 100_000), OperandError, "cannot be read"),
    "an index without places": (replace_text(INDEX, "{}"), OperandError, "no weight_map"),
    "no index": (
        lambda directory: (directory / INDEX).unlink(),
        OperandError,
        "without model.safe",
    ),
    "a missing weight": (
        edit(lambda tensors: [tensors.pop(WEIGHT), tensors.pop(f"{WEIGHT}_scale_inv")]),
        OperandError,
        rf"lacks {WEIGHT}, which the model has",
    ),
    "a missing norm": (
        edit(lambda tensors: tensors.pop("blocks.0.norm.bias")),
        OperandError,
        "lacks blocks.0.norm.bias",
    ),
    "a tensor too many": (
        edit(lambda tensors: tensors.update({"blocks.1.norm.bias": torch.ones(2)})),
        OperandError,
        r"holds blocks\.1\.norm\.bias, which the model has not",
    ),
    "a scale too many": (
        edit(lambda tensors: tensors.update({"lm_head.weight_scale_inv": torch.ones(1, 1)})),
        OperandError,
        r"lm_head\.weight_scale_inv, which the model has not",
    ),
    "a missing scale": (
        edit(lambda tensors: tensors.pop(f"{WEIGHT}_scale_inv")),
        OperandError,
        rf"'{WEIGHT}' holds codes of F8_E4M3, and has 0 scales",
    ),
    "two scales": (
        edit(lambda tensors: tensors.update({f"{WEIGHT}_scale": torch.ones(2, 2)})),
        OperandError,
        "has 2 scales",
    ),
    "scales of another shape": (scale(torch.ones(2, 3)), OperandError, r"scales \[2, 3\]; the"),
    "scales of one dimension": (scale(torch.ones(4)), OperandError, r"scales \[4\]"),
    "another block size": (
        scale(torch.ones(3, 3)),
        OperandError,
        r"blocks of \[128, 128\] need \[2, 2\]. They would fit blocks of \[54, 54\]",
    ),
    "another block size in the config": (
        configure(weight_block_size=[64, 64]),
        OperandError,
        r"blocks of \[64, 64\] need \[3, 3\]",
    ),
    "a scale of NaN": (scale(torch.full((2, 2), torch.nan)), OperandError, "NaN, infinite or neg"),
    "a byte of NaN": (
        scale(torch.full((2, 2), 255, dtype=torch.uint8)),
        OperandError,
        "NaN, infinite or neg",
    ),
    "a negative scale": (scale(-torch.ones(2, 2)), OperandError, "NaN, infinite or negative"),
    "scales of integers": (
        scale(torch.ones(2, 2, dtype=torch.int32)),
        UnsupportedError,
        "scales in torch.int32",
    ),
    "scales of a dtype without a name in torch": (
        header_bytes(b'"F32"', b'"F4X"'),
        OperandError,
        "damaged or cut off",
    ),
    "codes of another shape": (
        edit(lambda tensors: tensors.update({WEIGHT: tensors[WEIGHT][:-1].clone()})),
        OperandError,
        rf"'{WEIGHT}' is \[159, 160\] in the checkpoint, expected \[160, 160\]",
    ),
    "a norm of another shape": (
        edit(lambda tensors: tensors.update({"blocks.0.norm.bias": torch.ones(2)})),
        OperandError,
        r"blocks\.0\.norm\.bias' is \[2\] in the checkpoint, \[160\] here",
    ),
    "a bias of integers": (
        edit(lambda tensors: tensors.update({"positions": torch.ones(4)})),
        OperandError,
        r"positions' is F32 in the checkpoint, torch\.int64 here",
    ),
    "an unknown method": (
        configure(quant_method="awq"),
        UnsupportedError,
        "quant_method='awq', which is not read; fp8 and compressed-tensors are",
    ),
    "blocks of nonsense": (
        configure(weight_block_size=[128, -1]),
        OperandError,
        r"blocks of \[128, -1\]",
    ),
    "an unknown format": (configure(fmt="e3m4"), UnsupportedError, "fmt='e3m4'"),
    "another format than that of the codes": (
        configure(fmt="e5m2"),
        OperandError,
        "holds e4m3 in the checkpoint; the quantization_config says e5m2",
    ),
    "integers": (
        groups(type="int", num_bits=4, strategy="group", group_size=128),
        UnsupportedError,
        "weights of type 'int', 4 bits",
    ),
    "zero points": (
        groups(type="float", num_bits=8, strategy="tensor", symmetric=False),
        UnsupportedError,
        "zero points",
    ),
    "no groups": (
        configure(quant_method="compressed-tensors"),
        OperandError,
        "no config_groups",
    ),
    "one code a byte for FP4": (
        groups(type="float", num_bits=4, strategy="tensor_group", group_size=16),
        OperandError,
        "two codes a byte, the file differs",
    ),
    "a key twice in the index": (
        replace_text(INDEX, '{"weight_map": {"a": "x", "a": "y"}}'),
        OperandError,
        "it has a twice",
    ),
    "a key twice in the config": (
        replace_text("config.json", '{"quantization_config": {}, "quantization_config": {}}'),
        OperandError,
        "it has quantization_config twice",
    ),
    "a pipe for a config": (
        in_the_place_of("config.json", os.mkfifo),
        OperandError,
        "is no regular file",
    ),
    "a pipe for an index": (in_the_place_of(INDEX, os.mkfifo), OperandError, "is no regular file"),
    "a link to nothing for an index": (
        in_the_place_of(INDEX, lambda path: path.symlink_to("nowhere")),
        OperandError,
        "No such file",
    ),
    "a link to nothing for a config": (
        in_the_place_of("config.json", lambda path: path.symlink_to("nowhere")),
        OperandError,
        "No such file",
    ),
    "no config": (
        replace_text("config.json", "{}"),
        OperandError,
        "config.json has no quantization_config",
    ),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("saved")
    save_pretrained(model(), directory, "block", max_shard_size="20KB")
    return directory


def copied(saved: Path, directory: Path) -> Path:
    for path in saved.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    return directory


@pytest.mark.parametrize("name", BAD)
def test_a_bad_checkpoint_changes_nothing(name: str, saved: Path, tmp_path: Path) -> None:
    change, kind, words = BAD[name]
    change(copied(saved, tmp_path))
    net: Model = model(seed=1)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    for native in (False, True):
        with pytest.raises(kind, match=words) as caught:
            load_pretrained(tmp_path, net, native)
        assert str(caught.value).count("Nothing was loaded") <= 1
        for key, value in net.state_dict().items():
            assert type(value) is torch.Tensor
            assert torch.equal(value, before[key])


def test_a_pipe_for_a_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(OperandError, match="is no regular file"):
        load_pretrained(tmp_path, model())


def test_the_unchanged_checkpoint_loads(saved: Path) -> None:
    load_pretrained(saved, model(seed=1))


def test_codes_that_no_recipe_multiplies_are_not_kept(saved: Path, tmp_path: Path) -> None:
    words = r"no recipe multiplies e4m3 in blocks of \[64, 64\]"
    copied(saved, tmp_path)
    ones = {name.replace("s.0.w", f"s.{n}.w"): torch.ones(3, 3) for n in (0, 1) for name in SCALES}
    edit(lambda tensors: tensors.update(ones))(tmp_path)
    configure(weight_block_size=[64, 64])(tmp_path)
    with pytest.raises(UnsupportedError, match=words):
        load_pretrained(tmp_path, model(), native=True)
    assert load_pretrained(tmp_path, model()).recipe is None


def test_codes_of_a_float64_parameter_are_not_kept(saved: Path) -> None:
    with pytest.raises(UnsupportedError, match=r"parameter is torch\.float64"):
        load_pretrained(saved, model(dtype=torch.float64), native=True)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    torch.save(model().state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(OperandError, match=r"pytorch_model\.bin is a pickle, which is not read"):
        load_pretrained(tmp_path, model())


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(OperandError, match="no such directory"):
        load_pretrained(tmp_path / "none", model())


def test_a_sharded_parameter_is_refused(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    for name in ("embed.weight", WEIGHT):
        monkeypatch.setattr(net.get_parameter(name), "device_mesh", object(), raising=False)
    with pytest.raises(UnsupportedError, match="it is sharded over processes"):
        load_pretrained(saved, net, native=True)
    with pytest.raises(UnsupportedError, match="sharded"):
        save_pretrained(net, saved / "new", "block")


def test_the_names_of_the_package_are_these() -> None:
    assert fp8core.checkpoints.__all__ == sorted(fp8core.checkpoints.__all__)
    from fp8core import huggingface

    assert huggingface.save_pretrained is save_pretrained
    assert huggingface.load_pretrained is load_pretrained
