"""Any size works: what a format cannot take is padded with zeros, exactly, and reported once."""

from __future__ import annotations

import copy
import io
import pickle
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fp8core
from fp8core import GroupedLinear, Linear, autocast, frozen_weights, recipe, reporting
from fp8core.backend_api import Alignment, GemmDesc
from fp8core.chain import padding
from fp8core.chain.call import Call
from fp8core.chain.padding import LayerPadding
from fp8core.dispatch import table
from fp8core.modules.calls.bind import bind
from fp8core.tensors.storage import padded_with, split
from fp8core_backends.reference.backend import ReferenceBackend
from tests.device import DEVICE
from tests.pairs import turns

WHOLE_BLOCKS = {
    "mxfp8": (recipe.MXFP8BlockScaling(), 32),
    "nvfp4": (recipe.NVFP4BlockScaling(disable_stochastic_rounding=True), 16),
}
PARTIAL_BLOCKS = ["current", "delayed", "rowwise", "block"]


@pytest.fixture
def plain_casts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the reference deny casts that add zeros behind rows, as a backend may."""
    unsupported = ReferenceBackend.unsupported

    def denied(self: ReferenceBackend, desc: Any, device: torch.device) -> str | None:
        return "no zeros" if getattr(desc, "padded", 0) else unsupported(self, desc, device)

    monkeypatch.setattr(ReferenceBackend, "unsupported", denied)
    table.forget()
    yield
    table.forget()


def pad(x: torch.Tensor, multiple: int) -> torch.Tensor:
    """Zero-pad every dimension of ``x`` to a multiple."""
    amounts = [amount for size in reversed(x.shape) for amount in (0, -size % multiple)]
    return torch.nn.functional.pad(x, amounts)


def step(
    layer: Linear, x: torch.Tensor, dy: torch.Tensor, chosen: recipe.Recipe
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    with autocast(recipe=chosen):
        y = layer(x)
    y.backward(dy)
    return y.detach(), x.grad, layer.weight.grad, layer.bias.grad


@pytest.mark.parametrize(
    ("name", "shape"),
    turns(WHOLE_BLOCKS, [(1, 1, 1), (33, 47, 31), (32, 33, 64), (31, 64, 32)]),
    ids=str,
)
def test_a_padded_layer_has_the_bits_of_one_padded_by_hand(
    name: str, shape: tuple[int, int, int]
) -> None:
    chosen, multiple = WHOLE_BLOCKS[name]
    m, k, n = shape
    x, dy = torch.randn(m, k).bfloat16(), torch.randn(m, n).bfloat16()
    layer = Linear(k, n, params_dtype=torch.bfloat16)
    torch.nn.init.normal_(layer.bias)
    rows, cols = pad(layer.weight.detach(), multiple).shape
    padded = Linear(cols, rows, params_dtype=torch.bfloat16)
    with torch.no_grad():
        padded.weight.copy_(pad(layer.weight, multiple))
        padded.bias.copy_(pad(layer.bias, multiple))
    y, dx, dw, db = step(padded, pad(x, multiple), pad(dy, multiple), chosen)
    wanted = (y[:m, :n], dx[:m, :k], dw[:n, :k], db[:n])
    for got, want in zip(step(layer, x, dy, chosen), wanted, strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("name", WHOLE_BLOCKS)
def test_a_padded_group_has_the_bits_of_a_linear_of_its_own(name: str) -> None:
    chosen, _ = WHOLE_BLOCKS[name]
    splits = [5, 0, 33]
    grouped = GroupedLinear(3, 20, 9, params_dtype=torch.bfloat16)
    x = torch.randn(38, 20).bfloat16()
    with autocast(recipe=chosen):
        y = grouped(x, splits)
    for group, (x_g, y_g) in enumerate(zip(x.split(splits), y.split(splits), strict=True)):
        alone = Linear(20, 9, params_dtype=torch.bfloat16)
        with torch.no_grad():
            alone.weight.copy_(getattr(grouped, f"weight{group}"))
        with autocast(recipe=chosen):
            assert torch.equal(alone(x_g), y_g)


def test_a_format_with_partial_blocks_is_not_padded() -> None:
    for name in PARTIAL_BLOCKS:
        layer = Linear(33, 7)
        with autocast(recipe=recipe.by_name(name)):
            op = bind(layer, DEVICE, torch.float32).linears[0]
        assert op.padding is None, name


def test_high_precision_is_not_padded() -> None:
    assert bind(Linear(33, 7), DEVICE, torch.float32).linears[0].padding is None


@pytest.mark.usefixtures("plain_casts")
def test_the_report_names_the_layer_and_what_is_added(caplog: pytest.LogCaptureFixture) -> None:
    layer = Linear(40, 24, name="decoder.3.fc1")
    with autocast(recipe=recipe.MXFP8BlockScaling()):
        layer(torch.randn(3, 40))
    line = next(line for line in caplog.messages if "decoder.3.fc1" in line)
    assert all(word in line for word in ("input features by 24", "output features by 8", "of 32"))


@pytest.mark.usefixtures("plain_casts")
def test_rows_alone_are_reported_once_for_all_layers(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "_logged", set())
    layers = [Linear(64, 64, name=f"rows_alone.{at}") for at in range(4)]
    layers.insert(2, Linear(64, 33, name="rows_and_features"))
    with autocast(recipe=recipe.MXFP8BlockScaling()):
        for rows in (5, 6):
            for layer in layers:
                layer(torch.ones(rows, 64))
    assert caplog.messages == [
        "'rows_alone.0' (Linear(64, 64)): pads with zeros, as its products take no such sizes: "
        "rows to a multiple of 32; other layers that pad rows do not say so again",
        "'rows_and_features' (Linear(64, 33)): pads with zeros, as its products take no such "
        "sizes: output features by 31, rows to a multiple of 32",
    ]


@pytest.mark.usefixtures("plain_casts")
def test_layers_that_pad_the_same_features_are_reported_in_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reporting, "_logged", set())
    layers = [Linear(64, 33, name=f"padded.{at}") for at in range(4)]
    with autocast(recipe=recipe.MXFP8BlockScaling()):
        for layer in (*layers, *layers):
            layer(torch.ones(32, 64))
    (line,) = (line for line in caplog.messages if "padded" in line)
    assert line.startswith("4 layers ('padded.0' (Linear(64, 33)), 'padded.1' (Linear(64, 33)),")
    assert line.endswith(
        " and 1 more): pads with zeros, as its products take no such sizes: "
        "output features by 31, rows to a multiple of 32"
    )


def test_aligned_sizes_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    layer = Linear(64, 32, name="aligned_sizes")
    with autocast(recipe=recipe.MXFP8BlockScaling()):
        layer(torch.randn(32, 64))
    assert not [line for line in caplog.messages if "aligned_sizes" in line]


def test_padded_results_are_contiguous() -> None:
    layer = Linear(40, 24)
    x = torch.randn(3, 40, requires_grad=True)
    with autocast(recipe=recipe.MXFP8BlockScaling()):
        y = layer(x)
    y.sum().backward()
    assert y.is_contiguous()
    assert x.grad.is_contiguous()


def test_a_call_that_fits_is_left_alone() -> None:
    assert LayerPadding("layer", (16, 16, 16), 0, 0).for_call(32, Call()) is None


def test_groups_are_padded_each_and_cut_back() -> None:
    offsets = torch.tensor([0, 2, 2, 5])
    padded = LayerPadding("groups_are_padded", (1, 4, 2), 1, 0).for_call(
        5, Call((offsets,), (2, 0, 3))
    )
    assert padded is not None
    assert padded.groups[0].tolist() == [0, 4, 4, 8]
    x = torch.arange(1.0, 6.0)[:, None]
    made = padded.pad_input(x)
    assert made.tolist() == [[v, 0.0] for v in (1.0, 2.0, 0.0, 0.0, 3.0, 4.0, 5.0, 0.0)]
    assert torch.equal(padded.cut(made, padded.layer.in_features), x)


class Written(TorchDispatchMode):
    """Counts the elements that torch's operators write, and notes what memory they make."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.of_size: dict[tuple[int, ...], set[torch.dtype]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.new_empty, torch.ops.aten.constant_pad_nd):
            self.of_size[tuple(result.shape)].add(result.dtype)
        if not isinstance(result, torch.Tensor):  # parts, or statistics
            return result
        (alias,) = (returned.alias_info for returned in func._schema.returns)
        is_computed = alias is None and func.overloadpacket is not torch.ops.aten.new_empty
        if is_computed or (alias is not None and alias.is_write):  # no view
            self.elements += result.numel()
        return result


class Copies(TorchDispatchMode):
    """Takes down how many columns each copy has."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket is torch.ops.aten.copy_:
            self.widths.append(args[1].shape[1])
        return func(*args, **(kwargs or {}))


def test_padding_writes_each_element_once() -> None:
    layer = LayerPadding("written_once", (1, 1, 16), 3, 9)
    padded = layer.for_call(50, Call())
    assert padded is not None
    for pad, columns in ((padded.pad_input, 3), (padded.pad_grad_output, 9)):
        x = torch.randn(50, 20)
        with Written() as written:
            made = pad(x)
        assert written.elements == 64 * (20 + columns)
        assert torch.equal(made, torch.nn.functional.pad(x, (0, columns, 0, 14)))
    weight = torch.randn(40, 20)
    with Written() as written:
        made = padded_with(weight, (9, 3))
    assert written.elements == 49 * 23
    assert torch.equal(made, torch.nn.functional.pad(weight, (0, 3, 0, 9)))


@pytest.mark.parametrize("rows", [0, 3])
def test_rows_with_room_between_them_are_copied_at_once(rows: int) -> None:
    memory = torch.arange(7 * 16, dtype=torch.uint8)
    before, wanted = memory.clone(), torch.nn.functional.pad
    for codes in (memory.view(7, 16)[:, :11], memory[16:].as_strided((6, 11), (16, 1), 16)):
        with Copies() as copies:
            made = padded_with(codes, (rows, 5))
        assert copies.widths == [16]
        assert torch.equal(made, wanted(codes, (0, 5, 0, rows)))
        assert torch.equal(memory, before)
    for codes in (memory[: 6 * 16 + 11].clone().as_strided((7, 11), (16, 1)), memory.view(16, 7)):
        with Copies() as copies:
            made = padded_with(codes, (rows, 5))
        assert copies.widths == [codes.shape[1]]
        assert torch.equal(made, wanted(codes, (0, 5, 0, rows)))


def test_a_tensor_without_padding_is_not_copied() -> None:
    padded = LayerPadding("not_copied", (1, 1, 1), 0, 9).for_call(50, Call())
    assert padded is not None
    x = torch.randn(50, 20)
    assert padded.pad_input(x) is x


def test_rows_of_groups_are_written_once() -> None:
    sizes = [17, 0, 40, 7]
    call = Call((torch.tensor([0, 17, 17, 57, 64]),), sizes)
    padded = LayerPadding("rows_are_written_once", (1, 1, 16), 0, 0).for_call(64, call)
    assert padded is not None
    x = torch.randn(64, 8)
    with Written() as pad:
        made = padded.pad_input(x)
    assert made.shape == (96, 8)
    assert pad.elements == (96 + 15) * 8
    with Written() as cut:
        back = padded.cut(made, 0)
    assert cut.elements == 64 * 8
    assert torch.equal(back, x)


def test_rows_are_padded_for_the_gemms_of_the_call_alone() -> None:
    padding = LayerPadding("rows_of_gemms", (1, 4, 6), 0, 0)
    rows = {
        (needs_input, needs_weight): padding.for_call(
            1, Call(), needs_input=needs_input, needs_weight=needs_weight
        )
        for needs_input in (False, True)
        for needs_weight in (False, True)
    }
    assert rows.pop((False, False)) is None
    assert {needs: padded.rows for needs, padded in rows.items() if padded is not None} == {
        (True, False): 4,
        (False, True): 6,
        (True, True): 12,
    }


@pytest.mark.usefixtures("plain_casts")
@pytest.mark.parametrize("name", WHOLE_BLOCKS)
def test_padded_rows_leave_the_weight_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen, multiple = WHOLE_BLOCKS[name]
    layer, x = Linear(2 * multiple, multiple), torch.randn(3, 2 * multiple)
    padded, pad_any = [], padding.padded_with

    def pad(x: torch.Tensor, sizes: tuple[int, int]) -> torch.Tensor:
        padded.append(x)
        return pad_any(x, sizes)

    monkeypatch.setattr(padding, "padded_with", pad)
    with autocast(recipe=chosen):
        layer(x).sum().backward()
    assert padded
    assert all(one is not layer.weight and one.shape != layer.weight.shape for one in padded)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kind", ["linear", "grouped", "mlp"])
@pytest.mark.parametrize("name", WHOLE_BLOCKS)
def test_rows_get_their_zeros_in_the_cast(
    name: str,
    kind: str,
    bias: bool,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    splits = [3, 0, 34]
    make = {
        "linear": lambda: Linear(64, 32, bias=bias),
        "grouped": lambda: GroupedLinear(3, 64, 32, bias=bias),
        "mlp": lambda: fp8core.LayerNormMLP(64, 64, bias=bias),
    }[kind]
    ours, theirs = make(), make()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(37, 64)
    monkeypatch.setattr(padding, "padded_with", lambda *_: pytest.fail("a tensor was padded"))

    def run(layer: Any) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        with autocast(recipe=WHOLE_BLOCKS[name][0]):
            y = layer(leaf, splits) if kind == "grouped" else layer(leaf)
        assert y.shape[0] == 37
        y.backward(torch.ones_like(y))
        return [y.detach(), leaf.grad, *(param.grad for param in layer.parameters())]

    found = run(ours)
    monkeypatch.setattr(padding, "padded_with", padded_with)
    request.getfixturevalue("plain_casts")
    for got, wanted in zip(found, run(theirs), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(("name", "kind"), turns(WHOLE_BLOCKS, ["linear", "grouped"]))
def test_padding_does_not_depend_on_torch_s_default_device(name: str, kind: str) -> None:
    chosen, _ = WHOLE_BLOCKS[name]
    if name == "nvfp4":
        chosen = recipe.NVFP4BlockScaling(disable_rht=True)
    x = torch.randn(5, 40)
    layer = Linear(40, 24) if kind == "linear" else GroupedLinear(2, 40, 24)
    torch.set_default_device("meta")
    try:
        with autocast(recipe=chosen):
            y = layer(x) if kind == "linear" else layer(x, [2, 3])
        y.sum().backward()
    finally:
        torch.set_default_device(None)
    assert y.device.type == DEVICE.type


class _Padded(torch.nn.Module):
    """Its input ``[rows, 4]`` with rows padded to a multiple of 16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        padding = LayerPadding("layer", (16, 1, 1), 0, 0).for_call(x.shape[0], Call())
        return x if padding is None else padding.pad_input(x)


@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # torch's own
def test_an_exported_program_pads_any_number_of_rows() -> None:
    rows = ({0: torch.export.Dim("rows")},)
    program = torch.export.export(_Padded(), (torch.ones(32, 4),), dynamic_shapes=rows)
    for count in (5, 16, 33):
        x = torch.randn(count, 4)
        assert torch.equal(program.module()(x), _Padded()(x))


K, N, ROWS = 40, 24, 16
"""K and N are no multiples of 16."""
COPIES = {torch.ops.aten.constant_pad_nd, torch.ops.aten.copy_, torch.ops.aten.clone}


@pytest.fixture
def whole_blocks_of_16(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the reference's products take the sizes that a GPU's take."""
    own = ReferenceBackend.alignment

    def alignment(self: ReferenceBackend, desc: GemmDesc) -> Alignment:
        needed = own(self, desc)
        return needed._replace(n=16, k=max(16, needed.k)) if desc.low_precision else needed

    monkeypatch.setattr(ReferenceBackend, "alignment", alignment)
    table.forget()
    yield
    table.forget()


class Copied(TorchDispatchMode):
    """Counts the copies of tensors of a weight's size, padded ones too, but of no other dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.overloadpacket in COPIES and tuple(args[0].shape) in ((N, K), (K, N)):
            self.count += 1
        return func(*args, **(kwargs or {}))


def outputs(layer: Any, x: torch.Tensor, *splits: Any, **keywords: Any) -> torch.Tensor:
    """Return the layer's output twice; no weight is copied for the second."""
    layer(x, *splits, **keywords)
    again = {**keywords, "is_first_microbatch": False} if keywords else {}
    with Copied() as copied:
        y: torch.Tensor = layer(x, *splits, **again)
    assert copied.count == 0
    return y


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_a_weight_in_frozen_weights_is_padded_once(kind: str, name: str) -> None:
    layer = Linear(K, N) if kind == "linear" else GroupedLinear(2, K, N)
    x, splits = torch.randn(ROWS, K), () if kind == "linear" else ([5, 11],)
    with torch.no_grad(), autocast(recipe=name):
        expected = layer(x, *splits)
        with frozen_weights(layer):
            assert torch.equal(outputs(layer, x, *splits), expected)


def test_a_weight_of_microbatches_is_padded_once() -> None:
    for name in ["mxfp8", "nvfp4"]:
        layer, x = Linear(K, N), torch.randn(ROWS, K)
        with torch.no_grad(), autocast(recipe=name):
            expected = layer(x)
            assert torch.equal(outputs(layer, x, is_first_microbatch=True), expected), name


@pytest.mark.usefixtures("whole_blocks_of_16")
@pytest.mark.parametrize("name", ["current", "rowwise", "block", "delayed"])
@pytest.mark.parametrize("kind", ["plain", "stored"])
def test_a_stored_weight_that_is_frozen_is_padded_once(kind: str, name: str) -> None:
    x = torch.randn(ROWS, K)
    with fp8core.quantized_model_init(enabled=kind == "stored", recipe=name):
        layer = Linear(K, N)
    with torch.no_grad(), autocast(recipe=name):
        expected = layer(x)
        with frozen_weights(layer):
            assert torch.equal(outputs(layer, x), expected)
        assert torch.equal(outputs(layer, x, is_first_microbatch=True), expected)


@pytest.mark.usefixtures("whole_blocks_of_16")
def test_a_stored_weight_is_padded_again_after_a_write() -> None:
    x = torch.randn(ROWS, K)
    with fp8core.quantized_model_init(recipe="current"):
        layer = Linear(K, N)
    with torch.no_grad(), autocast(recipe="current"):
        before = layer(x, is_first_microbatch=True)
        layer.weight.copy_(torch.randn(N, K))
        after = layer(x)
        assert not torch.equal(before, after)
        for first in (False, True):
            assert torch.equal(layer(x, is_first_microbatch=first), after)


@pytest.mark.usefixtures("whole_blocks_of_16")
@pytest.mark.parametrize("name", ["current", "rowwise", "block", "delayed"])
def test_rows_of_a_weight_are_added_to_its_codes(name: str) -> None:
    chosen = replace(recipe.by_name(name), requantize_weights=True)
    layer, wide = Linear(48, N, bias=False), Linear(48, 32, bias=False)
    x, dy = torch.randn(ROWS, 48).requires_grad_(), torch.randn(ROWS, N)
    with torch.no_grad():
        wide.weight.copy_(pad(layer.weight, 16))
    for _ in range(2):
        with autocast(recipe=chosen):
            wanted = wide(x)
        (grad,) = torch.autograd.grad(wanted, x, torch.nn.functional.pad(dy, (0, 8)))
        with Written() as written:
            with autocast(recipe=chosen):
                y = layer(x)
            (made,) = torch.autograd.grad(y, x, dy)
        assert torch.equal(y, wanted[:, :N])
        assert torch.equal(made, grad)
        assert written.of_size[32, 48] == {torch.uint8}


STORED = ["current", "rowwise", "block"]


def stored_linear(name: str) -> Linear:
    with fp8core.quantized_model_init(recipe=name):
        layer = Linear(K, N, bias=False)
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(-1, 1, N * K).view(N, K))
    return layer


def gradients(layer: Any, name: str, *splits: Any) -> tuple[list[torch.Tensor], int]:
    """Return the output and the gradient of the input, and how often a weight was copied."""
    x = torch.linspace(-2, 2, ROWS * K).view(ROWS, K).requires_grad_()
    with Copied() as copied, autocast(recipe=name):
        y = layer(x, *splits)
        (grad,) = torch.autograd.grad(y, x, torch.linspace(-1, 1, y.numel()).view_as(y))
    return [y.detach(), grad], copied.count


def without_room(layer: Any) -> Any:
    """Return the layer with its weights in memory of their own size."""
    for name, weight in list(layer.named_parameters()):
        if isinstance(weight, fp8core.QuantizedTensor):
            assert weight._padded is not None
            small = fp8core.QuantizedTensor(*split(weight._packed()), weight.plan, weight.dtype)
            setattr(layer, name, torch.nn.Parameter(small, requires_grad=False))
    return layer


@pytest.mark.usefixtures("whole_blocks_of_16")
@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_a_stored_weight_is_copied_in_no_call(kind: str, name: str) -> None:
    if kind == "linear":
        layer, splits = stored_linear(name), ()
    else:
        with fp8core.quantized_model_init(recipe=name):
            layer, splits = GroupedLinear(2, K, N), ([5, 11],)
    layer.requires_grad_(False)
    results, copies = gradients(layer, name, *splits)
    assert copies == 0
    expected, copies = gradients(without_room(layer), name, *splits)
    assert copies
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@pytest.mark.usefixtures("whole_blocks_of_16")
@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize(
    "changed",
    [
        lambda layer: layer.weight.copy_(torch.randn(N, K)),
        lambda layer: layer.weight.detach().copy_(torch.randn(N, K)),
        lambda layer: layer.weight.data.quantize_(torch.randn(N, K)),
        lambda layer: setattr(layer.weight, "data", torch.randn(N, K)),
        lambda layer: [part.copy_(part.flip(0)) for part in layer.weight.tensors()],
        lambda layer: layer.load_state_dict({"weight": torch.randn(N, K)}, strict=False),
        lambda layer: layer.weight.zero_(),
    ],
    ids=["copy", "detach", "quantize", "data", "parts", "load", "zero"],
)
def test_the_zeros_of_a_stored_weight_outlive_a_write(changed: Any, name: str) -> None:
    layer = stored_linear(name).requires_grad_(False)
    before, _ = gradients(layer, name)
    with torch.no_grad():
        changed(layer)
    results, copies = gradients(layer, name)
    assert copies == 0
    assert not torch.equal(results[0], before[0])
    expected, _ = gradients(without_room(layer), name)
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@pytest.mark.usefixtures("whole_blocks_of_16")
@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize(
    "copy",
    [copy.deepcopy, lambda layer: layer.to_empty(device=DEVICE).requires_grad_(False)],
    ids=["deepcopy", "to_empty"],
)
def test_a_copy_of_a_stored_weight_has_zeros_of_its_own(copy: Any, name: str) -> None:
    layer = stored_linear(name).requires_grad_(False)
    expected, _ = gradients(layer, name)
    other = copy(layer)
    other.load_state_dict(layer.state_dict())
    with torch.no_grad():
        if other is not layer:
            layer.weight.zero_()
    results, copies = gradients(other, name)
    assert copies == 0
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@pytest.mark.usefixtures("whole_blocks_of_16")
@pytest.mark.parametrize("name", STORED)
@pytest.mark.parametrize(
    "copy",
    [lambda layer: layer, copy.deepcopy, lambda layer: layer.to_empty(device=DEVICE)],
    ids=["itself", "deepcopy", "to_empty"],
)
def test_a_write_between_forward_and_backward_is_seen(copy: Any, name: str) -> None:
    layer = copy(stored_linear(name).requires_grad_(False))
    assert layer.weight._padded is not None
    x = torch.randn(ROWS, K).requires_grad_()
    with autocast(recipe=name):
        y = layer(x)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(N, K))
    with pytest.raises(fp8core.OperandError, match="was written in place since"):
        y.sum().backward()


@pytest.mark.usefixtures("whole_blocks_of_16")
def test_files_have_no_zeros_of_a_stored_weight() -> None:
    layer, file = stored_linear("rowwise"), io.BytesIO()
    assert {part.untyped_storage().nbytes() for part in layer.weight.tensors()} != {N * K}
    torch.save(layer.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)["weight"]
    assert torch.equal(loaded.dequantize(), layer.weight.dequantize())
    for part in loaded.tensors():
        assert part.is_contiguous()
        assert part.untyped_storage().nbytes() == part.nbytes
    other = stored_linear("rowwise").requires_grad_(False)
    other.load_state_dict({"weight": loaded}, strict=False)
    pairs = zip(gradients(other, "rowwise")[0], gradients(layer, "rowwise")[0], strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.usefixtures("whole_blocks_of_16")
@pytest.mark.skipif(DEVICE.type != "cpu", reason="a process cannot open its own memory of a GPU")
@pytest.mark.parametrize(
    "copy",
    [copy.copy, lambda weight: pickle.loads(ForkingPickler.dumps(weight))],
    ids=["copy", "process"],
)
def test_a_stored_weight_shares_its_memory(copy: Any) -> None:
    layer = stored_linear("rowwise").share_memory()
    shared = copy(layer.weight)
    with torch.no_grad():
        shared.copy_(torch.ones(N, K))
    assert torch.equal(layer.weight.dequantize(), torch.ones(N, K))


@pytest.mark.usefixtures("whole_blocks_of_16")
def test_a_stored_weight_of_one_orientation_is_refused_before_it_is_padded() -> None:
    layer = stored_linear("rowwise")
    layer.weight.update_usage(rowwise_usage=False)
    with autocast(recipe="rowwise"), pytest.raises(fp8core.OperandError, match="stored as None"):
        layer(torch.randn(ROWS, K))


@pytest.mark.usefixtures("whole_blocks_of_16")
def test_a_usage_that_is_dropped_takes_the_zeros_along() -> None:
    layer = stored_linear("current").requires_grad_(False)
    layer.weight.update_usage(columnwise_usage=False)
    layer.weight.update_usage(columnwise_usage=True)
    expected, _ = gradients(stored_linear("current").requires_grad_(False), "current")
    results, _ = gradients(layer, "current")
    assert all(torch.equal(*pair) for pair in zip(results, expected, strict=True))


@pytest.mark.usefixtures("whole_blocks_of_16")
@pytest.mark.parametrize("name", ["current", "rowwise"])
def test_a_product_of_tensors_copies_no_stored_weight(name: str) -> None:
    layer, results = stored_linear(name).requires_grad_(False), []
    x, dy = torch.randn(ROWS, K), torch.randn(ROWS, N)
    for weight in (layer.weight, without_room(copy.deepcopy(layer)).weight):
        a, grad = (fp8core.QuantizedTensor.of(value, weight.plan) for value in (x, dy))
        a.requires_grad_()
        with Copied() as copied:
            y = fp8core.functional.gemm(a, weight)
            y.backward(grad)
        results.append((y.detach(), a.grad, copied.count))
    (*ours, copies), (*theirs, others) = results
    assert copies == 0 < others
    assert all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


@pytest.mark.usefixtures("whole_blocks_of_16")
@pytest.mark.parametrize("name", ["current", "rowwise", "block"])
@pytest.mark.parametrize("kind", ["plain", "stored"])
def test_gradients_of_a_checkpoint_are_those_without(kind: str, name: str) -> None:
    with fp8core.quantized_model_init(enabled=kind == "stored", recipe=name):
        layer = Linear(K, N)
    grads = []
    for is_checkpoint in (False, True):
        layer.zero_grad()
        x = torch.linspace(-1, 1, ROWS * K).view(ROWS, K).requires_grad_()
        with autocast(recipe=name), frozen_weights(layer):
            y = fp8core.checkpoint(layer, x) if is_checkpoint else layer(x)
            y.sum().backward()
        grads.append((x.grad, layer.weight.grad))
    assert all(torch.equal(*pair) for pair in zip(*grads, strict=True))
