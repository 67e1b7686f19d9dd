"""What a file may hold in the place of a quantized tensor: nothing that does not fit gets in."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

import fp8core
from fp8core import (
    Fp8CoreError,
    OperandError,
    QuantizedTensor,
    UnsupportedError,
    functional,
    recipe,
)
from fp8core.quantizers import Float8CurrentScalingQuantizer, MXFP8Quantizer, NVFP4Quantizer
from fp8core.recipe.plan import LayerRole, TensorPlan
from fp8core.tensors.quantized_tensor import _rebuild, _rebuild_part
from fp8core.tensors.storage import PARTS
from tests.ranks import run_ranks
from tests.refusals import unrefused

RECIPES = {
    "current": recipe.Float8CurrentScaling(),
    "rowwise": recipe.Float8RowwiseScaling(),
    "block": recipe.Float8BlockScaling(),
    "mxfp8": recipe.MXFP8BlockScaling(),
    "mxfp8 both ways": recipe.MXFP8BlockScaling(enable_2d_quantization=True),
    "nvfp4": recipe.NVFP4BlockScaling(),
}
Change = Callable[[dict[str, Any]], None]


def quantized(name: str, value: torch.Tensor | None = None) -> QuantizedTensor:
    value = torch.randn(64, 96) if value is None else value
    return QuantizedTensor.quantize(value, RECIPES[name].plan(LayerRole(), value.dtype).weight)


class Stored:
    """A file's entry that calls what a QuantizedTensor's calls, with any arguments."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __reduce__(self) -> Any:
        return _rebuild, self.arguments


def fields(tensor: QuantizedTensor) -> dict[str, Any]:
    """Return what is saved of ``tensor``, by name."""
    _, (parts, specs, dtype, is_parameter, requires_grad) = tensor.__reduce_ex__(2)
    made: dict[str, Any] = dict(zip(PARTS, parts, strict=True))
    row, column = specs
    return {
        **made,
        "row": row,
        "column": column,
        "rest": (dtype, is_parameter, requires_grad),
    }


def load(changed: dict[str, Any]) -> Any:
    file = io.BytesIO()
    parts = [changed[name] for name in PARTS]
    torch.save(Stored(parts, [changed["row"], changed["column"]], *changed["rest"]), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def put(name: str, make: Callable[[torch.Tensor], Any]) -> Change:
    def change(saved: dict[str, Any]) -> None:
        saved[name] = make(saved[name])

    return change


def put_field(name: str, value: Any) -> Change:
    def change(saved: dict[str, Any]) -> None:
        saved["row"] = {**saved["row"], name: value}

    return change


def with_value(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(part: torch.Tensor) -> torch.Tensor:
        part = part.clone()
        part[(-1,) * part.dim()] = value
        return part

    return change


DATA, SCALE, GLOBAL = PARTS[:3]
SIZES: dict[str, tuple[str, Change]] = {
    "fewer rows of codes": ("mxfp8", put(DATA, lambda own: own[:32])),
    "no matrix of codes": ("block", put(DATA, lambda own: own.view(-1))),
    "codes of no dimension": ("block", put(DATA, lambda own: own[0, 0])),
    "codes of another dtype": ("mxfp8", put(DATA, lambda own: own.view(torch.int8))),
    "codes as bool": ("current", put(DATA, lambda own: own > 0)),
    "no codes": ("current", put(DATA, lambda own: None)),
    "codes that are a string": ("current", put(DATA, lambda own: "codes")),
    "sparse codes": ("current", put(DATA, lambda own: own.to_sparse())),
    "codes on meta": ("mxfp8", put(DATA, lambda own: own.to("meta"))),
    "codes that share memory": ("current", put(DATA, lambda own: own[:1].expand(64, 96))),
    "no scale": ("current", put(SCALE, lambda own: None)),
    "fewer scales": ("mxfp8", put(SCALE, lambda own: own[:, :2])),
    "scales of no dimension": ("current", put(SCALE, lambda own: own[0, 0])),
    "scales turned": ("nvfp4", put(SCALE, lambda own: own.t())),
    "scales in another dtype": ("block", put(SCALE, lambda own: own.double())),
    "scales for bytes": ("mxfp8", put(SCALE, lambda own: own.float())),
    "a scale that is a number": ("current", put(SCALE, lambda own: 1.0)),
    "scales on meta": ("mxfp8", put(SCALE, lambda own: own.to("meta"))),
    "one level of two": ("nvfp4", put(GLOBAL, lambda own: None)),
    "two levels of one": ("mxfp8", put(GLOBAL, lambda own: torch.ones(1, 1))),
    "no columnwise codes": ("mxfp8", put(PARTS[3], lambda own: None)),
    "fewer columnwise codes": ("nvfp4", put(PARTS[3], lambda own: own[:32])),
    "fewer columnwise scales": ("rowwise", put(PARTS[4], lambda own: own[:32])),
    "columnwise codes that share memory": ("mxfp8", put(PARTS[3], lambda o: o[:1].expand(96, 64))),
    "columnwise codes on meta": ("mxfp8", put(PARTS[3], lambda own: own.to("meta"))),
    "nothing columnwise": (
        "mxfp8",
        lambda saved: saved.update(dict.fromkeys(PARTS[3:])),
    ),
    "columnwise parts that are not planned": ("rowwise", lambda saved: saved.update(column=None)),
}
SCALES: dict[str, tuple[str, Change]] = {
    **{
        f"{kind} {value}": (kind, put(SCALE, with_value(value)))
        for kind in ("current", "block", "rowwise")
        for value in (math.nan, math.inf, 0.0, -1.0)
    },
    **{
        f"second level {value}": ("nvfp4", put(GLOBAL, with_value(value)))
        for value in (math.nan, math.inf, 0.0, -1.0)
    },
    "columnwise nan": ("rowwise", put(PARTS[4], lambda own: own * math.nan)),
    "e8m0 nan": ("mxfp8", put(SCALE, with_value(0xFF))),
    "e4m3 nan": ("nvfp4", put(SCALE, with_value(0x7F))),
    "e4m3 less than zero": ("nvfp4", put(SCALE, with_value(0x81))),
    "e4m3 minus zero": ("nvfp4", put(SCALE, with_value(0x80))),
}
PLANS: dict[str, tuple[str, Change]] = {
    "no plan": ("current", lambda saved: saved.update(row=None)),
    "a plan that is a string": ("current", lambda saved: saved.update(row="e4m3")),
    "an unknown field": ("current", put_field("colour", 1)),
    "an unknown format": ("current", put_field("format", "e4m4")),
    "a format that is no name": ("current", put_field("format", 7)),
    "an unknown scale format": ("current", put_field("scale_format", "e9m9")),
    "blocks of another size": ("mxfp8", put_field("block", (1, 16))),
    "a negative block": ("block", put_field("block", (-1, 128))),
    "a block of one number": ("block", put_field("block", (128,))),
    "a block of no numbers": ("block", put_field("block", "12")),
    "an endless block": ("block", put_field("block", (10**400, 128))),
    "an endless target": ("current", put_field("target", 10**400)),
    "a target of nan": ("current", put_field("target", math.nan)),
    "a flag that is a list": ("current", put_field("power_of_two", [1])),
    "stochastic": ("current", put_field("stochastic", True)),
    "delayed": ("current", put_field("delayed", True)),
    "transformed": ("nvfp4", put_field("transform", "hadamard16")),
    "an integer dtype": ("current", lambda saved: saved.update(rest=(torch.int8, False, False))),
    "a dtype by name": ("current", lambda saved: saved.update(rest=("bfloat16", True, True))),
}


@pytest.mark.parametrize("name", RECIPES)
def test_what_a_cast_writes_loads(name: str) -> None:
    for factor, special in (
        *((1.0, 1.0), (0.0, 0.0), (1.0, math.inf), (1.0, math.nan)),
        *((1e-44, 0.0), (1e37, 1e37)),
    ):
        value = torch.randn(64, 96) * factor
        value[3, 5] = special
        saved = quantized(name, value)
        loaded = load(fields(saved))
        pairs = zip(loaded.tensors(), saved.tensors(), strict=True)
        assert loaded.plan == saved.plan
        assert all(torch.equal(*pair) for pair in pairs), (factor, special)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_zero_blocks_of_the_golden_vectors_load(
    name: str, golden: Callable[[str], dict[str, np.ndarray]]
) -> None:
    theirs = ("columnwise_data_of_transpose", "columnwise_scale_of_transpose")
    prefix, keys, step = {
        "mxfp8": (
            "mxfp8/zero_blocks.bf16/e4m3/",
            ("rowwise_data", "rowwise_scale", *theirs),
            1,
        ),
        "nvfp4": (
            "nvfp4/zero_blocks.bf16/tile=16x16/rht=0/",
            ("data", "scale", "data_t", "scale_t"),
            16,  # theirs repeats a square block's scale in each of its rows
        ),
    }[name]
    data, scale, data_t, scale_t = (
        torch.from_numpy(golden(f"{name}_seed0")[prefix + key]) for key in keys
    )
    second = torch.ones(1, 1) if name == "nvfp4" else None
    parts = [data, scale[::step], second, data_t, scale_t[::step], second]
    loaded = load({**fields(quantized(name)), **dict(zip(PARTS, parts, strict=True))})
    assert (scale == 0).any()
    assert loaded.dequantize().isfinite().all()


# torch 2.11's, about sparse tensors.
@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
@pytest.mark.parametrize("cases", [SIZES, SCALES, PLANS], ids=["sizes", "scales", "plans"])
def test_what_no_cast_writes_is_refused_by_name(cases: dict[str, tuple[str, Change]]) -> None:
    def changed(name: str, change: Change) -> Any:
        saved = fields(quantized(name))
        change(saved)
        return load(saved)

    error, said = Fp8CoreError, "QuantizedTensor|parameter"
    table = {case: (partial(changed, *change), error, said) for case, change in cases.items()}
    assert unrefused(table) == {}


def test_parts_that_do_not_fit_make_no_tensor() -> None:
    def make(name: str, change: Change) -> QuantizedTensor:
        tensor = quantized(name)
        saved = fields(tensor)
        change(saved)
        plan = tensor.plan if saved["column"] is not None else TensorPlan(tensor.plan.rowwise, None)
        inner = {part: saved[part] for part in PARTS if saved[part] is not None}
        return QuantizedTensor.__tensor_unflatten__(inner, (plan, tensor.dtype), None, None)

    table = {
        case: (partial(make, *change), OperandError, "QuantizedTensor stored as")
        for case, change in SIZES.items()
        if "share memory" not in case
    }
    assert unrefused(table) == {}


@pytest.mark.parametrize("parts", [None, 5, "six", {}, [], torch.ones(6)], ids=repr)
def test_something_else_than_parts_is_refused_by_name(parts: Any) -> None:
    specs = [fields(quantized("mxfp8"))[name] for name in ("row", "column")]
    with pytest.raises(OperandError, match=r"its parts are|expected a tensor"):
        _rebuild(parts, specs, torch.float32, False, False)


@pytest.mark.parametrize("flag", [torch.ones(3), "yes", None, [[]]], ids=repr)
def test_flags_that_are_none_are_off(flag: Any) -> None:
    saved = fields(quantized("mxfp8"))
    parts, specs = [saved[name] for name in PARTS], [saved["row"], saved["column"]]
    made = _rebuild(parts, specs, torch.float32, flag, flag)
    assert type(made) is QuantizedTensor
    assert not made.requires_grad


def test_a_plan_of_endless_depth_is_refused_by_name() -> None:
    nested: Any = []
    for _ in range(100):
        nested = [nested]
    saved = {**fields(quantized("current")), "row": nested}
    with pytest.raises(OperandError, match="no quantizer plans"):
        load(saved)


def test_a_format_that_no_plug_in_registers_is_named() -> None:
    saved = fields(quantized("current"))
    for way in ("row", "column"):
        saved[way] = {**saved[way], "format": "toy9"}
    with pytest.raises(OperandError, match=r"no format 'toy9'; known: .* plug-in that is missing"):
        load(saved)


@pytest.mark.parametrize("name", RECIPES)
def test_padding_has_scales_that_load(name: str) -> None:
    padded = torch.nn.functional.pad(quantized(name), (0, 32, 0, 64))
    assert isinstance(padded, QuantizedTensor)
    assert torch.equal(load(fields(padded)).dequantize(), padded.dequantize())


def test_a_stored_tensor_on_meta_loads() -> None:
    with fp8core.quantized_model_init(recipe=RECIPES["mxfp8"]):
        layer = fp8core.Linear(64, 64, device="meta")
    assert load(fields(layer.weight.detach())).is_meta


QUANTIZERS = {
    "mxfp8": MXFP8Quantizer("e4m3"),
    "nvfp4_row": NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False),
    "current": Float8CurrentScalingQuantizer("e4m3", "cpu"),
}


def whole(name: str) -> QuantizedTensor:
    torch.manual_seed(0)
    return QUANTIZERS[name](torch.randn(64, 128))


def work(rank: int, name: str) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh

    mesh, tensor = init_device_mesh("cpu", (2,)), whole(name)
    part = tensor.chunk(2)[rank]
    shards = DTensor.from_local(part, mesh, [Shard(0)])
    full = shards.full_tensor()
    spread = distribute_tensor(tensor, mesh, [Shard(0)], src_data_rank=None)
    refused = ""
    try:
        torch.distributed.all_reduce(tensor)
    except UnsupportedError as error:
        refused = str(error)
    return {
        "kind": type(shards.to_local()).__name__,
        "gathered": type(full).__name__,
        "values": functional.dequantize(full),
        "spread": functional.dequantize(spread.full_tensor()),
        "spread_kind": type(spread.to_local()).__name__,
        "sum": (shards + 1).full_tensor(),
        "view": functional.dequantize(shards.view(2, 32, 128).full_tensor()),
        "refused": refused,
    }


@pytest.mark.parametrize(
    ("name", "gathered"),
    [("mxfp8", "QuantizedTensor"), ("nvfp4_row", "QuantizedTensor"), ("current", "Tensor")],
)
def test_shards_stay_quantized_and_are_gathered(tmp_path: Path, name: str, gathered: str) -> None:
    expected = whole(name).dequantize()
    for made in run_ranks(work, tmp_path, name):
        assert (made["kind"], made["spread_kind"]) == ("QuantizedTensor", "QuantizedTensor")
        assert made["gathered"] == gathered
        for key in ("values", "spread"):
            assert torch.equal(made[key], expected)
        assert torch.equal(made["sum"], expected + 1)
        assert torch.equal(made["view"], expected.view(2, 32, 128))
        assert "tensors()" in made["refused"]


def test_memory_that_is_not_there_is_not_read(tmp_path: Path) -> None:
    """Operators with lists of lists of tensors reach C++ code past ``__torch_dispatch__``."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        for tensor in (whole("mxfp8"), whole("mxfp8").t()):
            out = torch.zeros(tensor.shape)
            with pytest.raises(RuntimeError, match="Cannot access data pointer"):
                torch.distributed.scatter(out, [tensor], src=0)
            assert tensor.data_ptr() == 0
    finally:
        torch.distributed.destroy_process_group()


SQUARES = {
    "current": (Float8CurrentScalingQuantizer("e4m3", None), RECIPES["current"]),
    "mxfp8 both ways": (
        MXFP8Quantizer("e4m3", with_2d_quantization=True),
        RECIPES["mxfp8 both ways"],
    ),
}


def trained(weight: torch.Tensor, chosen: recipe.Recipe) -> list[torch.Tensor]:
    layer = fp8core.Linear(96, 64, bias=False)
    layer.weight = torch.nn.Parameter(weight)
    x = torch.linspace(-1, 1, 32 * 96).reshape(32, 96).requires_grad_()
    for _ in range(2):  # the second call replays the first
        layer.zero_grad()
        x.grad = None
        with fp8core.autocast(recipe=chosen):
            y = layer(x)
        (y * y).sum().backward()
    assert x.grad is not None
    assert layer.weight.grad is not None
    return [y.detach(), x.grad, layer.weight.grad]


@pytest.mark.parametrize("name", SQUARES)
def test_a_weight_of_columns_alone_is_multiplied_as_one_of_both(name: str) -> None:
    """Squares have the codes of both orientations."""
    quantizer, chosen = SQUARES[name]
    value = torch.randn(64, 96)
    both = trained(quantizer(value), chosen)
    columns = quantizer.copy()
    columns.set_usage(rowwise=False)
    alone = columns(value)
    assert alone.get_usages() == {"rowwise": False, "columnwise": True}
    assert all(torch.equal(*pair) for pair in zip(trained(alone, chosen), both, strict=True))
    with fp8core.autocast(recipe=chosen), torch.no_grad():
        layer = fp8core.Linear(96, 64, bias=False)
        layer.weight = torch.nn.Parameter(columns(value), requires_grad=False)
        x = torch.linspace(-1, 1, 32 * 96).reshape(32, 96)
        assert torch.equal(layer(x), both[0])
        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(x), both[0])


def test_a_weight_of_columns_in_lines_alone_is_refused() -> None:
    columns = MXFP8Quantizer("e4m3", rowwise=False)(torch.randn(64, 96))
    with pytest.raises(OperandError, match=r"stored as None \(columnwise e4m3"):
        trained(columns, RECIPES["mxfp8"])


def test_a_weight_of_rows_alone_infers_as_one_of_both() -> None:
    value, x = torch.randn(64, 96), torch.randn(32, 96)
    layer = fp8core.Linear(96, 64, bias=False)
    outputs = []
    for columnwise in (True, False):
        weight = MXFP8Quantizer("e4m3", columnwise=columnwise)(value)
        layer.weight = torch.nn.Parameter(weight, requires_grad=False)
        with fp8core.autocast(recipe=RECIPES["mxfp8"]), torch.no_grad():
            outputs.append(layer(x))
    assert torch.equal(*outputs)


# --- a delayed scale, by which a Float8Quantizer's tensors are written


def delayed(scale: float) -> fp8core.Float8Quantizer:
    return fp8core.Float8Quantizer(torch.tensor([scale]), torch.zeros(1), "e4m3")


def in_a_file(saved: Any, **how: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True, **how)


AGAIN: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda tensor: pickle.loads(pickle.dumps(tensor)),
    "torch.save": in_a_file,
    "torch.save of a parameter": lambda tensor: in_a_file(torch.nn.Parameter(tensor)),
    "torch.save of a view": lambda tensor: in_a_file(tensor.view(4, 16, 96)).view(64, 96),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("again", AGAIN)
def test_a_tensor_with_a_delayed_scale_is_written_by_it_from_a_file_too(again: str) -> None:
    value = torch.randn(64, 96)
    tensor = AGAIN[again](delayed(2.0)(value))
    with torch.no_grad():
        tensor.quantize_(4 * value)
    assert torch.equal(tensor.dequantize(), delayed(2.0)(4 * value).dequantize())
    quantizer = tensor._get_quantizer()
    assert isinstance(quantizer, fp8core.Float8Quantizer)
    assert (quantizer.scale.item(), quantizer.amax.item()) == (2.0, 4 * value.abs().max().item())


def test_a_scale_and_its_tensor_in_one_file_stay_one() -> None:
    quantizer = delayed(2.0)
    loaded = in_a_file({"weight": quantizer(torch.randn(64, 96)), "scale": quantizer.scale})
    loaded["scale"].fill_(0.5)
    assert loaded["weight"]._get_quantizer().scale.item() == 0.5


def test_a_delayed_scale_moves_with_its_tensor() -> None:
    tensor = delayed(2.0)(torch.randn(64, 96))
    for moved in (tensor.to("meta"), in_a_file(tensor, map_location="meta")):
        assert moved._get_quantizer().scale.is_meta
        assert moved._get_quantizer().amax.is_meta


def test_a_padded_tensor_is_written_by_the_delayed_scale_of_the_other() -> None:
    value = torch.randn(128, 96)
    padded = torch.nn.functional.pad(delayed(2.0)(value[:64]), (0, 0, 0, 64))
    with torch.no_grad():
        padded.copy_(4 * value)
    assert torch.equal(padded.dequantize(), delayed(2.0)(4 * value).dequantize())


def freed() -> torch.Tensor:
    tensor = torch.ones(1)
    tensor.untyped_storage().resize_(0)
    return tensor


SLOTS: dict[str, list[Any]] = {
    "one": [torch.ones(1)],
    "three": [torch.ones(1)] * 3,
    "no scale": [None, torch.ones(1)],
    "numbers": [1.0, 1.0],
    "two scales": [torch.ones(2), torch.ones(1)],
    "float64": [torch.ones(1, dtype=torch.float64), None],
    "elsewhere": [torch.ones(1, device="meta"), None],
    "amax without memory": [torch.ones(1), freed()],
}


@pytest.mark.parametrize("name", SLOTS)
def test_a_stored_slot_that_is_none_is_refused(name: str) -> None:
    saved = fields(quantized("current"))
    parts, specs = [saved[part] for part in PARTS], [saved["row"], saved["column"]]
    stored = ([*parts, *SLOTS[name]], specs, torch.float32, False, False, [64, 96])
    for make in (_rebuild, lambda *arguments: _rebuild_part(arguments)):
        with pytest.raises(OperandError, match=r"has the (delayed scale|value)"):
            make(*stored)


@pytest.mark.parametrize("name", ["current", "delayed", "block", "mxfp8", "nvfp4"])
def test_a_copy_of_a_state_for_an_asynchronous_save_holds_the_operands(name: str) -> None:
    """``async_save`` writes such a copy while the model goes on."""
    with fp8core.quantized_model_init(recipe=name, preserve_high_precision_init_val=True):
        layer = fp8core.Linear(128, 64, params_dtype=torch.bfloat16, device="cpu")
    weight: Any = layer.weight.data
    part = weight[:32] if name in ("current", "delayed") else weight
    state = {**layer.state_dict(), "part": part}
    expected = {key: x.dequantize().clone() for key, x in state.items() if x.dim() == 2}
    assert len(expected) == 2
    stager = StateDictStager(False, False)  # torch's DefaultStager before 2.13 takes one state
    for _ in range(2):  # the second time into the memory of the first
        copied = stager.stage(state)
    with torch.no_grad():
        layer.weight.copy_(torch.ones(64, 128))
    assert not torch.equal(state["weight"].dequantize(), expected["weight"])
    for key, value in expected.items():
        assert type(copied[key]) is QuantizedTensor
        assert torch.equal(copied[key].dequantize(), value)
        file = io.BytesIO()
        torch.save(copied[key], file)
        assert torch.equal(torch.load(io.BytesIO(file.getvalue())).dequantize(), value)


def test_an_empty_tensor_like_a_quantized_one_is_plain_unless_its_device_is_named() -> None:
    x: Any = MXFP8Quantizer("e4m3")(torch.ones(32, 64))
    x.new_empty((32, 64), device="cpu").copy_(torch.zeros(32, 64))
    assert torch.equal(x.dequantize(), torch.ones(32, 64))
    others = [x.new_empty(32, 64), x.new_empty(64, 64, device="cpu"), torch.empty_like(x)]
    others.append(x.new_empty((32, 64), dtype=torch.float16, device="cpu"))
    assert [type(other) for other in others] == [torch.Tensor] * 4
    assert x.new_empty((32, 64), device="meta").plan == x.plan
