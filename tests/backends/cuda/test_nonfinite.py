"""What the native casts count: each NaN and inf once, and no code differs for it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fp8core
from fp8core import recipe
from fp8core.backend_api import OperandSpec, QuantizeDesc
from fp8core.recipe.plan import LayerRole
from fp8core_backends.cuda import quantize_chunked
from tests.backends.cuda.cuda_cases import (
    DEVICE,
    DTYPES,
    backend,
    differs,
    nothing_waits,
    spec,
    values,
)
from tests.pairs import pairs

pytestmark = pytest.mark.needs_accelerator("cuda")
# One element; ragged, read one by one and in vectors; whole tiles; more tiles than are resident.
SHAPES = ((1, 1), (3, 5), (127, 129), (130, 264), (256, 512), (1000, 33), (4096, 2048))
BYTE_SCALED_SHAPES = ((32, 32), (96, 160), (160, 96), (256, 512), (4096, 2048))
CASTS = ("delayed", "current", "rowwise", "vector", "square")
NAMES = ("mxfp8", "nvfp4")
BEFORE = 2**40  # more than 32 bits hold
WHERE = ((0, 0), (-1, -1), (0, -1), (-1, 0))


def planned(name: str, tensor: str) -> tuple[OperandSpec | None, OperandSpec | None]:
    plan = recipe.by_name(name).plan(LayerRole("linear"), torch.bfloat16)
    return tuple(getattr(plan, tensor))


def keywords(desc: QuantizeDesc, groups: int = 1) -> dict[str, Any]:
    own = [one for one in (desc.rowwise, desc.columnwise) if one is not None]
    if any(one.delayed for one in own):
        scale = torch.arange(1, groups + 1, device=DEVICE) * 0.37
        return {"scale": scale, "amax_out": torch.zeros(groups, device=DEVICE)}
    return {"rng": torch.tensor([5, 7])} if any(one.stochastic for one in own) else {}


def inputs(shape: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Nothing to count; one element at each corner; some of each kind; nothing else."""
    largest = torch.full(shape, torch.finfo(dtype).max, dtype=dtype, device=DEVICE)
    made = [values("wide", shape, torch.float32).clamp(-1e4, 1e4).to(dtype), largest, -largest]
    for place, value in zip(WHERE, (math.inf, -math.inf, math.nan, -math.nan), strict=True):
        made.append(values("normal", shape, dtype))
        made[-1][place] = value
    made.append(values("specials", shape, dtype))
    made += [torch.full_like(largest, value) for value in (math.nan, math.inf)]
    return made


def check(desc: QuantizeDesc, x: torch.Tensor, *, is_compared: bool = True) -> None:
    run = backend("cuda").bind(desc, DEVICE)
    count = torch.tensor([BEFORE], device=DEVICE)
    made = run(x, **keywords(desc), nonfinite_out=count)
    assert int(count) - BEFORE == int((~x.isfinite()).sum()), (desc, x.shape)
    without = run(x, **keywords(desc))
    for one, other in zip(made, without, strict=True):
        assert differs(one, other) is None
    if is_compared:
        judge = backend("reference").bind(desc, DEVICE)
        for one, other in zip(made, judge(x, **keywords(desc)), strict=True):
            assert differs(one, other) is None


@pytest.mark.parametrize(
    ("name", "element", "dtype"), pairs(CASTS, ["e4m3", "e5m2"], DTYPES), ids=str
)
def test_casts_with_float32_scales(name: str, element: str, dtype: torch.dtype) -> None:
    own = spec(name, element)
    both = QuantizeDesc(dtype, own, own)
    for shape in SHAPES:
        for x in inputs(shape, dtype):
            for desc in (both, *both.halves()):
                check(desc, x, is_compared=x.numel() < 2**20)


@pytest.mark.parametrize(
    ("name", "tensor", "dtype"), pairs(NAMES, ["input", "weight", "grad_output"], DTYPES), ids=str
)
def test_casts_with_byte_scales(name: str, tensor: str, dtype: torch.dtype) -> None:
    both = QuantizeDesc(dtype, *planned(name, tensor))
    for shape in BYTE_SCALED_SHAPES:
        for x in inputs(shape, dtype):
            for desc in (both, *both.halves()):
                check(desc, x, is_compared=x.numel() < 2**20)


def test_strided_inputs() -> None:
    for name in CASTS:
        own = spec(name)
        whole = values("specials", (264, 272), torch.bfloat16)
        for x in (whole[:, 8:264], whole[1:, 1:], whole.t(), whole[:1].expand(64, -1)):
            check(QuantizeDesc(torch.bfloat16, own, own), x)


def test_orientations_of_two_specs_count_once() -> None:
    check(
        QuantizeDesc(torch.bfloat16, spec("vector"), spec("square")),
        inputs((256, 264), DTYPES[0])[-3],
    )


@pytest.mark.parametrize("name", CASTS)
def test_groups_on_the_device(name: str) -> None:
    own, rows = spec(name), 300
    for sizes in (
        (0, 130, 1, 0, 33, 100),
        (300,),
        (0, 0),
        (5, 0, 17),
        tuple(i % 7 for i in range(70)),
    ):
        x = values("specials", (rows, 264), torch.bfloat16)
        x[::7] = math.nan
        offsets = torch.tensor((0, *sizes), device=DEVICE).cumsum(0)
        both = QuantizeDesc(torch.bfloat16, own, own, grouped=True, offsets_on_device=True)
        for desc in (both, *both.halves()):
            count = torch.tensor([BEFORE], device=DEVICE)
            run = backend("cuda").bind(desc, DEVICE)
            run(x, offsets, **keywords(desc, len(sizes)), nonfinite_out=count)
            assert int(count) - BEFORE == int((~x[: sum(sizes)].isfinite()).sum()), sizes


@pytest.mark.parametrize("name", ["delayed", "current"])
def test_a_pair_counts_for_each(name: str) -> None:
    own = spec(name)
    run = backend("cuda").bind(QuantizeDesc(torch.bfloat16, own, own), DEVICE)
    for shape in ((3, 5), (130, 264), (1024, 512)):
        xs = (values("specials", shape, torch.bfloat16), values("nan", (256, 128), torch.bfloat16))
        given = {}
        if name == "delayed":
            given = {"scale": tuple(torch.ones(1, device=DEVICE) for _ in xs)}
        counts = tuple(torch.zeros(1, dtype=torch.int64, device=DEVICE) for _ in xs)
        run.bind_pair(run)(*xs, **given, nonfinite_out=counts)
        assert [int(one) for one in counts] == [int((~x.isfinite()).sum()) for x in xs]
        run.bind_pair(run)(*xs, **given, nonfinite_out=(None, counts[1]))
        assert [int(one) for one in counts] == [int((~xs[0].isfinite()).sum()), 2]


@pytest.mark.parametrize("name", ["delayed", "current", "vector"])
def test_parts_count_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantize_chunked, "CHUNK_ROWS", 128)
    monkeypatch.setattr(quantize_chunked, "LEAST_SAVED", 1)
    own = spec(name)
    desc = QuantizeDesc(torch.bfloat16, own, own)
    run = backend("cuda").bind(desc, DEVICE)
    for shape in ((256, 128), (257, 130), (400, 264)):
        x = values("specials", shape, torch.bfloat16)
        count = torch.zeros(1, dtype=torch.int64, device=DEVICE)
        made = run.quantize_chunked(x, **keywords(desc), nonfinite_out=count)
        for _ in made.rowwise:
            pass
        assert int(count) == int((~x.isfinite()).sum())


def test_streams_add_to_one_count() -> None:
    own = spec("current")
    run = backend("cuda").bind(QuantizeDesc(torch.bfloat16, own, own), DEVICE)
    x = values("specials", (512, 512), torch.bfloat16)
    count = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    for turn in range(40):
        with torch.cuda.stream(streams[turn % 4]):
            run(x, nonfinite_out=count)
    torch.cuda.synchronize()
    assert int(count) == 40 * int((~x.isfinite()).sum())


# torch's own: that its check is a prototype.
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("name", ["delayed", "current", "block", "rowwise"])
def test_a_layer_counts_without_waiting_for_the_device(name: str) -> None:
    layer = fp8core.Linear(256, 128, bias=False, device=DEVICE, params_dtype=torch.bfloat16)
    x = torch.randn(256, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)

    def step(*places: tuple[int, int]) -> None:
        with fp8core.autocast(recipe=recipe.by_name(name)):
            y = layer(x)
        grad = torch.ones_like(y)
        for place in places:
            grad[place].fill_(math.inf)
        y.backward(grad)

    step()
    with nothing_waits():
        step((3, 5), (200, 100))
    assert layer._bindings.nonfinite[DEVICE].tolist() == [2, 0]


def test_a_replayed_graph_counts() -> None:
    layer = fp8core.Linear(256, 128, bias=False, device=DEVICE, params_dtype=torch.bfloat16)
    x = torch.randn(256, 256, device=DEVICE, dtype=torch.bfloat16)
    with torch.no_grad(), fp8core.autocast(recipe=recipe.Float8CurrentScaling()):
        layer(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            layer(x)
    x[0, :9] = math.nan
    for _ in range(3):
        graph.replay()
    assert layer._bindings.nonfinite[DEVICE].tolist() == [0, 27]


def chosen(name: str, **options: Any) -> recipe.Recipe:
    return type(recipe.by_name(name))(**options)


@pytest.mark.parametrize("rows", [96, 8192])  # the gradient of the latter is cast in parts
@pytest.mark.parametrize("name", ["delayed", "current", "block", "rowwise"])
def test_what_propagates_makes_results_nan(name: str, rows: int) -> None:
    layers = [
        fp8core.Linear(512, 4096, bias=False, device=DEVICE, params_dtype=torch.bfloat16)
        for _ in range(2)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    x = torch.randn(rows, 512, device=DEVICE, dtype=torch.bfloat16)

    def step(layer: torch.nn.Module, own: recipe.Recipe, *place: int) -> list[torch.Tensor]:
        source = x.detach().requires_grad_()
        layer.zero_grad()
        with fp8core.autocast(recipe=own):
            y = layer(source)
        grad = torch.full_like(y, 0.25)
        if place:
            grad[place] = math.inf
        y.backward(grad)
        return [y.detach(), source.grad, layer.weight.grad]

    for _ in range(2):
        plain = step(layers[0], chosen(name))
        marked = step(layers[1], chosen(name, nonfinite="propagate"))
        assert torch.equal(plain[0], marked[0])
        for one, other in zip(plain[1:], marked[1:], strict=True):  # parts may sum in another order
            torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-6)
    y, dx, dw = step(layers[1], chosen(name, nonfinite="propagate"), rows - 1, 4095)
    assert y.isfinite().all()
    assert dx.isnan().all()
    assert dw.isnan().all()
    assert all(own.isfinite().all() for own in layers[1].buffers() if own.is_floating_point())


@pytest.mark.parametrize("on_device", [False, True])
def test_groups_propagate(on_device: bool) -> None:
    layer = fp8core.GroupedLinear(
        3, 256, 128, bias=False, device=DEVICE, params_dtype=torch.bfloat16
    )
    x = torch.randn(384, 256, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    sizes: Any = torch.tensor([128, 0, 256], device=DEVICE) if on_device else [128, 0, 256]
    with fp8core.autocast(recipe=chosen("current", nonfinite="propagate")):
        y = layer(x, sizes)
    grad = torch.ones_like(y)
    assert y.isfinite().all()
    grad[200, 5] = math.nan
    y.backward(grad)
    assert x.grad.isnan().all()
    assert layer.weight2.grad.isnan().all()
    assert fp8core.found_inf(layer) == 1


@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["delayed", "current", "block", "rowwise"])
def test_a_watched_scaler_skips_the_step(name: str, fused: bool) -> None:
    layer = fp8core.Linear(256, 128, bias=False, device=DEVICE, params_dtype=torch.float32)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    fp8core.watch_grad_scaler(scaler, layer)
    fp8core.clear_found_inf(layer)  # graphs of other tests count for all models
    x = torch.randn(128, 256, device=DEVICE)

    def step(*place: int) -> bool:
        before = layer.weight.detach().clone()
        optimizer.zero_grad()
        with fp8core.autocast(recipe=recipe.by_name(name)):
            y = layer(x)
        grad = torch.ones_like(y)
        if place:
            grad[place] = math.inf
        scaler.scale(y).backward(grad)
        with nothing_waits():
            scaler.unscale_(optimizer)
            found = fp8core.found_inf(layer)
            fp8core.clear_found_inf(layer)
        assert found.device == DEVICE
        assert float(found) == float(bool(place))
        scaler.step(optimizer)
        scaler.update()
        return not torch.equal(before, layer.weight)

    assert [step(), step(3, 5), step()] == [True, False, True]
    assert scaler.get_scale() == 512.0


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
# Where the operators of a compiled layer leave a CUDA graph nothing to hold, torch 2.11 says so.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_layer_is_counted(mode: str) -> None:
    layer = fp8core.Linear(256, 128, bias=False, device=DEVICE, params_dtype=torch.bfloat16)
    compiled = torch.compile(layer, mode=mode)
    x = torch.randn(128, 256, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)

    def step(*place: int) -> float:
        torch.compiler.cudagraph_mark_step_begin()
        fp8core.clear_found_inf(layer)
        layer.zero_grad()
        x.grad = None  # the graph's own memory, which the next replay writes
        with fp8core.autocast(recipe=recipe.Float8CurrentScaling()):
            y = compiled(x)
        grad = torch.ones_like(y)
        if place:
            grad[place] = math.inf
        y.backward(grad)
        return float(fp8core.found_inf(layer))

    assert [step() for _ in range(4)] == [0.0] * 4
    assert [step(1, 2), step(), step(7, 7)] == [1.0, 0.0, 1.0]
