"""Views and copies of parts of a QuantizedTensor: whole blocks stay quantized, no write is lost."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable

import pytest
import torch

import fp8core
from fp8core import OperandError, QuantizedTensor, UnsupportedError
from fp8core.backend_api import OperandSpec
from fp8core.recipe.plan import TensorPlan
from tests.pairs import pairs, turns

SPECS = {
    "tensor": OperandSpec("e4m3", (0, 0), 448.0),
    "row": OperandSpec("e4m3", (1, 0), 448.0),
    "block": OperandSpec("e4m3", (1, 128), 448.0),
    "square": OperandSpec("e4m3", (128, 128), 448.0),
    "mx": OperandSpec("e4m3", (1, 32), 448.0, scale_format="e8m0"),
    "nv": OperandSpec("e2m1", (1, 16), 6.0, scale_format="e4m3"),
    "nv_row": OperandSpec("e2m1", (1, 16), 6.0, scale_format="e4m3", row_scaled=True),
}
WAYS = {"rowwise": (True, False), "columnwise": (False, True), "both": (True, True)}


KINDS = pytest.mark.parametrize(
    ("name", "way"),
    [*turns(SPECS, WAYS), *turns(["tensor", "mx", "nv", "nv_row"], ["both", "both", "columnwise"])],
)


def value(*shape: int) -> torch.Tensor:
    x = torch.randn(shape)
    return (x * torch.logspace(-2, 2, shape[-2])[:, None]).to(torch.bfloat16)


def quantized(name: str, way: str, x: torch.Tensor) -> QuantizedTensor:
    spec = SPECS[name]
    plan = TensorPlan(*(spec if held else None for held in WAYS[way]))
    return QuantizedTensor.of(x, plan)


def same(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    pairs = zip(a.tensors(), b.tensors(), strict=True)
    return a.shape == b.shape and a.plan == b.plan and all(torch.equal(*p) for p in pairs)


@KINDS
def test_leading_dimensions_are_rows(name: str, way: str) -> None:
    x = value(2, 128, 256)
    tensor = quantized(name, way, x)
    flat = quantized(name, way, x.view(256, 256))
    assert tensor.shape == x.shape
    assert torch.equal(tensor.dequantize().view(256, 256), flat.dequantize())
    error = (tensor.dequantize(torch.float32) - x.float()).norm() / x.float().norm()
    assert error < (0.2 if name.startswith("nv") else 0.05)


@pytest.mark.parametrize("shape", [(256,), (1, 256), (128, 2, 256), (2, 2, 64, 256), (0, 256)])
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape)
    tensor = QuantizedTensor.of(x, TensorPlan(SPECS["mx"], None))
    assert tensor.dequantize().shape == x.shape
    assert tensor.view(-1, 256).shape[-1] == 256


VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view": lambda x: x.view(2, 2, 128, 256),
    "flatten": lambda x: x.flatten(0, 1),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "detach": lambda x: x.detach(),
    "narrow": lambda x: x.narrow(0, 2, 2),
    "select": lambda x: x[1],
    "split": lambda x: x.split([1, 3])[1],
    "chunk": lambda x: x.chunk(2)[1],
    "unbind": lambda x: x.unbind()[3],
    "slice": lambda x: x[1:3],
    "columns": lambda x: x[..., 128:],
    "ellipsis": lambda x: x[...],
}


@pytest.mark.parametrize(("view", "name", "way"), pairs(VIEWS, SPECS, WAYS))
def test_a_view_stays_quantized_and_a_write_reaches_the_base_or_is_refused(
    view: str, name: str, way: str
) -> None:
    tensor = quantized(name, way, value(4, 128, 256))
    before = tensor.clone()
    part = VIEWS[view](tensor)
    assert isinstance(part, QuantizedTensor)
    expected = before.dequantize()
    assert torch.equal(part.dequantize(), VIEWS[view](expected))
    if part._shares_scales:
        with pytest.raises(UnsupportedError, match="scale covers more"):
            part.zero_()
        assert same(tensor, before)
        return
    part.zero_()
    VIEWS[view](expected).zero_()
    assert torch.equal(tensor.dequantize(), expected)


@pytest.mark.parametrize("name", ["tensor", "mx", "nv_row"])
def test_rows_that_lie_equally_far_apart_stay_quantized(name: str) -> None:
    tensor = quantized(name, "rowwise", value(4, 128, 256))
    for cut in (lambda x: x[:, -1], lambda x: x[1:, 5:6], lambda x: x.unbind(1)[3].unsqueeze(1)):
        part = cut(tensor)
        assert isinstance(part, QuantizedTensor)
        assert torch.equal(part.dequantize(), cut(tensor.dequantize()))
    with pytest.raises(UnsupportedError, match="cuts a block"):
        tensor[:, :2]


@pytest.mark.parametrize("name", ["mx", "nv_row", "block"])
def test_rows_of_a_rowwise_tensor_are_written_one_by_one(name: str) -> None:
    x = value(8, 256)
    tensor = quantized(name, "rowwise", x)
    for at in range(8):
        tensor[at] = x[7 - at]
    assert same(tensor, quantized(name, "rowwise", x.flip(0)))


CUTS: dict[str, Callable[[torch.Tensor], object]] = {
    "view_columns": lambda x: x.view(128, 8, 32),
    "narrow": lambda x: x.narrow(1, 5, 20),
    "slice": lambda x: x[:, :40],
    "select": lambda x: x.select(1, 3),
    "split": lambda x: x.split(24, dim=1),
    "chunk": lambda x: x.chunk(3, dim=1),
    "unbind": lambda x: x.unbind(1),
    "unsqueeze": lambda x: x.unsqueeze(-1),
    "step": lambda x: x[:, ::2],
}


@pytest.mark.parametrize(("cut", "name"), turns(CUTS, ["mx", "nv", "square", "mx"]))
def test_a_view_that_cuts_a_block_is_refused(cut: str, name: str) -> None:
    tensor = quantized(name, "both", value(128, 256))
    before = tensor.clone()
    with pytest.raises(UnsupportedError, match=r"cuts a block[\s\S]*dequantize"):
        CUTS[cut](tensor)
    assert same(tensor, before)


@pytest.mark.parametrize("name", ["tensor", "mx", "nv", "square", "row"])
def test_the_flat_view_has_the_values_and_is_written_as_a_whole(name: str) -> None:
    x = value(128, 256)
    tensor = quantized(name, "both", x)
    flat, other = tensor.view(-1), quantized(name, "both", x.flip(0))
    assert torch.equal(torch.cat([flat, x.view(-1)]), torch.cat([tensor.dequantize(), x]).view(-1))
    assert same(flat.view(128, 256), tensor)
    flat.copy_(x.flip(0).view(-1))
    assert same(tensor, other)
    assert torch.equal(flat.detach() * 1, other.dequantize().view(-1))
    if name == "tensor":  # a quantized view
        return
    with pytest.raises(UnsupportedError, match="a view of a QuantizedTensor"):
        flat.zero_()
    assert same(tensor, other)


def test_rows_cut_the_blocks_of_the_columnwise_orientation() -> None:
    tensor = quantized("mx", "both", value(64, 64))
    assert isinstance(tensor[:32], QuantizedTensor)
    with pytest.raises(UnsupportedError, match="update_usage"):
        tensor[3]
    tensor.update_usage(columnwise_usage=False)
    assert torch.equal(tensor[3].dequantize(), tensor.dequantize()[3])


def test_one_scale_a_tensor_takes_views_of_other_columns() -> None:
    tensor = quantized("tensor", "both", value(128, 256))
    flat = tensor.view(-1)
    assert torch.equal(flat.dequantize(), tensor.dequantize().view(-1))
    flat.zero_()
    assert not tensor.dequantize().any()


def test_rowwise_blocks_take_views_of_other_whole_blocks() -> None:
    tensor = quantized("mx", "rowwise", value(4, 64))
    wide, narrow = tensor.view(2, 128), tensor.view(8, 32)
    for made in (wide, narrow):
        assert torch.equal(made.dequantize(), tensor.dequantize().view(made.shape))
    narrow[7].zero_()
    assert not tensor.dequantize()[3, 32:].any()
    assert not wide.dequantize()[1, 96:].any()


def test_a_reshape_that_cuts_blocks_copies_the_values() -> None:
    tensor = quantized("mx", "both", value(32, 256))
    flat = torch.empty(32 * 256)
    for made in (
        *(tensor.reshape(-1), tensor.reshape((-1,)), tensor.reshape_as(flat)),
        *(tensor.flatten(), tensor.ravel()),
    ):
        assert type(made) is torch.Tensor
        assert torch.equal(made, tensor.dequantize().reshape(-1))
    assert isinstance(tensor.reshape(2, 16, 256), QuantizedTensor)


def test_flatten_of_leading_dimensions_stays_quantized() -> None:
    tensor = quantized("mx", "both", value(2, 32, 64))
    for made in (tensor.flatten(0, 1), tensor.flatten(end_dim=-2)):
        assert isinstance(made, QuantizedTensor)
        assert made.shape == (64, 64)
    with pytest.raises(OperandError, match="no such dimensions"):
        tensor.flatten(2, 1)


@KINDS
def test_cat_of_whole_blocks_stays_quantized(name: str, way: str) -> None:
    tensor = quantized(name, way, value(256, 256))
    for dim in (0, 1):
        joined = torch.cat(tensor.chunk(2, dim), dim)
        assert isinstance(joined, QuantizedTensor)
        assert same(joined, tensor)
        joined.zero_()
        assert tensor.dequantize().any()


def test_cat_of_tensors_with_scales_of_their_own() -> None:
    one, other = value(32, 64), value(32, 64) * 7
    for name, stays in (("mx", True), ("tensor", False), ("nv", False), ("nv_row", False)):
        parts = [quantized(name, "both", x) for x in (one, other)]
        joined = torch.cat(parts)
        assert isinstance(joined, QuantizedTensor) == stays
        values = joined.dequantize() if stays else joined
        assert torch.equal(values, torch.cat([part.dequantize() for part in parts]))
    rows = torch.cat([quantized("nv_row", "rowwise", x) for x in (one, other)])
    assert same(rows, quantized("nv_row", "rowwise", torch.cat([one, other])))


def test_cat_with_a_plain_tensor_gives_values() -> None:
    tensor, plain = quantized("mx", "both", value(32, 64)), value(32, 64)
    for parts in ([tensor, plain], [plain, tensor]):
        values = [p.dequantize() if p is tensor else p for p in parts]
        assert torch.equal(torch.cat(parts), torch.cat(values))


INDEXES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "index_select": lambda x: x.index_select(0, torch.tensor([3, 0, 3])),
    "list": lambda x: x[[2, -1]],
    "mask": lambda x: x[torch.tensor([True, False, True, False])],
    "matrix": lambda x: x[torch.tensor([[0, 1], [2, 3]])],
    "two": lambda x: x[torch.tensor([0, 1]), torch.tensor([5, 9])],
    "middle": lambda x: x.index_select(1, torch.tensor([3, 0])),
}


@pytest.mark.parametrize(
    ("index", "kind"),
    turns(INDEXES, ["mx rowwise", "nv_row rowwise", "row both", "tensor both", "nv rowwise"]),
)
def test_an_index_of_rows_stays_quantized(index: str, kind: str) -> None:
    tensor = quantized(*kind.split(), value(4, 16, 64))
    before = tensor.clone()
    made = INDEXES[index](tensor)
    assert isinstance(made, QuantizedTensor)
    assert torch.equal(made.dequantize(), INDEXES[index](tensor.dequantize()))
    made.zero_()
    assert same(tensor, before)


@pytest.mark.parametrize("index", INDEXES)
def test_an_index_that_cuts_blocks_gives_values(index: str) -> None:
    tensor = quantized("mx", "both", value(4, 16, 64))
    made = INDEXES[index](tensor)
    assert type(made) is torch.Tensor
    assert torch.equal(made, INDEXES[index](tensor.dequantize()))


def test_an_index_out_of_range_is_an_error() -> None:
    tensor = quantized("mx", "rowwise", value(4, 64))
    for call in (lambda: tensor[4], lambda: tensor[[4]], lambda: tensor.narrow(0, 3, 2)):
        with pytest.raises((IndexError, RuntimeError)):
            call()


def test_arithmetic_says_once_that_it_dequantizes(caplog: pytest.LogCaptureFixture) -> None:
    tensor = quantized("mx", "both", value(32, 64))
    with caplog.at_level(logging.WARNING, logger="fp8core"):
        for _ in range(3):
            made = torch.sinh(tensor)
        tensor.dequantize()
    said = [line for line in caplog.messages if "sinh" in line]
    assert len(said) == 1
    assert "dequantized values" in said[0]
    assert torch.equal(made, torch.sinh(tensor.dequantize()))


def test_usages_are_dropped_and_created_where_codes_are_the_same() -> None:
    x = value(128, 256)
    tensor = quantized("square", "rowwise", x)
    assert tensor.get_usages() == {"rowwise": True, "columnwise": False}
    tensor.update_usage(columnwise_usage=True)
    assert same(tensor, quantized("square", "both", x))
    tensor.update_usage(rowwise_usage=False)
    assert tensor.get_usages() == {"rowwise": False, "columnwise": True}
    assert torch.equal(tensor.dequantize(), quantized("square", "both", x).dequantize())
    with pytest.raises(OperandError, match="one orientation has to be held"):
        tensor.update_usage(columnwise_usage=False)


def test_a_usage_that_would_round_twice_is_refused() -> None:
    tensor = quantized("mx", "rowwise", value(64, 64))
    with pytest.raises(OperandError, match="another rounding"):
        tensor.update_usage(columnwise_usage=True)
    assert tensor.get_usages() == {"rowwise": True, "columnwise": False}


def test_copy_between_any_pair_writes_the_values() -> None:
    x = value(128, 256)
    kinds = [quantized(name, way, x) for name, way in turns(SPECS, WAYS)]
    for target in kinds:
        for source in (*kinds, x, x.float()):
            made = target.clone()
            made.zero_()
            assert made.copy_(source) is made
            values = source.dequantize() if isinstance(source, QuantizedTensor) else source
            error = (made.dequantize().float() - values.float()).norm() / values.float().norm()
            assert error < 0.2


def test_a_write_with_a_flag_leaves_the_tensor() -> None:
    x, other = value(32, 64), value(32, 64)
    tensor = quantized("mx", "both", x)
    assert tensor.quantize_(other, noop_flag=torch.ones(1)) is tensor
    assert same(tensor, quantized("mx", "both", x))
    tensor.quantize_(other, noop_flag=torch.zeros(1))
    assert same(tensor, quantized("mx", "both", other))
    tensor.quantize_(x)
    assert same(tensor, quantized("mx", "both", x))


@KINDS
def test_save_and_weights_only_load_keep_shape_and_orientation(
    name: str, way: str, tmp_path: object
) -> None:
    tensor = quantized(name, way, value(2, 128, 256))
    path = f"{tmp_path}/file"
    torch.save(tensor, path)
    loaded = torch.load(path, weights_only=True)
    assert same(loaded, tensor)


@pytest.mark.parametrize("shape", [[3, 64], [2, 16, 64], "32", [-32, -64], []])
def test_a_file_with_another_shape_is_refused(shape: object) -> None:
    tensor = quantized("mx", "both", value(32, 64))
    rebuild, arguments = tensor.__reduce_ex__(2)
    with pytest.raises(fp8core.OperandError):
        rebuild(*arguments[:5], shape if shape != [2, 16, 64] else [2, 17, 64])


def test_gradients_pass_views_and_copies() -> None:
    for call in (VIEWS["view"], VIEWS["select"], VIEWS["split"], lambda x: torch.cat([x, x])):
        tensor = quantized("mx", "rowwise", value(4, 128, 256)).requires_grad_()
        plain = tensor.dequantize().detach().requires_grad_()
        grads = []
        for one in (tensor, plain):
            out = call(one)
            weight = torch.linspace(0, 1, out.numel()).view(out.shape).to(out.dtype)
            (
                (out.dequantize() if isinstance(out, QuantizedTensor) else out) * weight
            ).sum().backward()
            grads.append(one.grad)
        assert type(grads[0]) is torch.Tensor
        assert torch.equal(*grads)


def test_a_transformed_orientation_alone_has_the_values() -> None:
    x = value(64, 96)
    for transform in ("hadamard16", "hadamard16_unsigned"):
        spec = OperandSpec("e2m1", (1, 16), 6.0, scale_format="e4m3", transform=transform)
        tensor = QuantizedTensor.of(x, TensorPlan(None, spec))
        error = (tensor.dequantize(torch.float32) - x.float()).norm() / x.float().norm()
        assert error < 0.15


GAPS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "every second row": lambda x: x[::2],
    "one row of every second": lambda x: x[::2][:1],
    "columns": lambda x: x[:, :128],
    "columns, with a dimension more": lambda x: x[:, :128].unsqueeze(1),
    "some rows": lambda x: x[128:],
}


@pytest.mark.parametrize(("cut", "way"), turns(GAPS, WAYS))
def test_contiguous_copies_where_torch_copies(cut: str, way: str) -> None:
    x = value(256, 256)
    part, plain = GAPS[cut](quantized("tensor", way, x)), GAPS[cut](x)
    assert part.stride() == plain.stride()
    copied = part.contiguous()
    assert (copied is part) == (plain.contiguous() is plain)
    assert torch.equal(copied.dequantize(), part.dequantize())


def test_reshape_copies_where_torch_finds_no_view() -> None:
    tensor = quantized("tensor", "rowwise", value(256, 256))
    assert type(tensor[:, :128].reshape(-1)) is torch.Tensor
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        tensor[:, :128].view(-1)


@KINDS
def test_deepcopy_of_a_view_for_reading_is_a_plain_tensor(name: str, way: str) -> None:
    turned = quantized(name, way, value(256, 256)).t()
    copied = copy.deepcopy({"a": turned, "b": turned})
    assert type(copied["a"]) is torch.Tensor
    assert copied["a"] is copied["b"]
    assert torch.equal(copied["a"], turned.dequantize())
    assert type(copy.copy(turned)) is type(turned)


def test_deepcopy_of_a_view_with_a_history_is_refused() -> None:
    turned = quantized("tensor", "both", value(256, 256)).requires_grad_().t()
    with pytest.raises(OperandError, match="take its detach"):
        copy.deepcopy(turned)
    assert copy.deepcopy(turned.detach().requires_grad_()).requires_grad
