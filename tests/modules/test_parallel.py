"""Tensor- and sequence-parallel layers against one process that computes with the same shards."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import fp8core
from fp8core import autocast, recipe
from fp8core.collectives import Communicator, of_group
from fp8core.errors import OperandError
from tests.in_process import communicators, run_in_threads
from tests.ranks import device, emulated, run_ranks

HIDDEN, FFN, ROWS = 256, 512, 256
RECIPES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
    "current": recipe.Float8CurrentScaling,
    "rowwise": recipe.Float8RowwiseScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "nvfp4": recipe.NVFP4BlockScaling,
}
EXACT = [name for name in RECIPES if name != "nvfp4"]


def values(size: int, *shape: int, seed: int) -> torch.Tensor:
    """Columns and rows of different magnitudes, so that a scale of the wrong rows shows."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator)
    return (x * torch.linspace(0.5, 4, shape[0])[:, None] * size).to(device(), torch.bfloat16)


class Data:
    """The tensors of a step: whole ones, of which each rank has its part."""

    def __init__(self, rows: int = ROWS, ranks: int = 2) -> None:
        self.x = [values(1, rows, HIDDEN, seed=step) for step in range(3)]
        self.dy = [values(1, rows, HIDDEN, seed=10 + step) for step in range(3)]
        self.w1 = values(1, FFN, HIDDEN, seed=20) * 0.05
        self.w2 = values(1, HIDDEN, FFN, seed=21) * 0.05
        self.b1 = values(1, FFN, 1, seed=22)[:, 0]
        self.b2 = values(1, HIDDEN, 1, seed=23)[:, 0]
        self.gamma = values(1, HIDDEN, 1, seed=24)[:, 0]
        self.ranks = ranks


def fill(mlp: Any, data: Data, rank: int) -> None:
    with torch.no_grad():
        mlp.layer_norm_weight.copy_(data.gamma)
        mlp.fc1_weight.copy_(data.w1.chunk(data.ranks)[rank])
        mlp.fc2_weight.copy_(data.w2.chunk(data.ranks, 1)[rank])
        if mlp.fc1_bias is not None:
            mlp.fc1_bias.copy_(data.b1.chunk(data.ranks)[rank])
            mlp.fc2_bias.copy_(data.b2)


def new_mlp(ffn: int = FFN, *, bias: bool = False, **arguments: Any) -> Any:
    return fp8core.LayerNormMLP(
        HIDDEN,
        ffn,
        bias=bias,
        normalization="RMSNorm",
        activation="gelu",
        params_dtype=torch.bfloat16,
        device=device(),
        **arguments,
    )


def parallel_mlp(
    communicator: Communicator, name: str, *, sequence: bool, rows: int = ROWS, bias: bool = False
) -> dict[str, Any]:
    """Three steps of a parallel MLP on one rank."""
    rank, size = communicator.rank, communicator.size
    data, chosen = Data(rows, size), RECIPES[name]()
    mlp = new_mlp(
        bias=bias, tp_group=communicator, sequence_parallel=sequence, set_parallel_mode=True
    )
    fill(mlp, data, rank)
    returned: dict[str, Any] = {}
    for step in range(3):
        x, dy = data.x[step], data.dy[step]
        if sequence:
            x, dy = x.chunk(size)[rank], dy.chunk(size)[rank]
        x = x.clone().requires_grad_()
        communicator.traffic.clear()
        mlp.zero_grad(set_to_none=True)
        torch.manual_seed(step)
        with emulated(name), autocast(enabled=chosen is not None, recipe=chosen):
            y = mlp(x)
        y.backward(dy)
        returned = {"y": y.detach(), "dx": x.grad}
        returned |= {key: one.grad for key, one in mlp.named_parameters()}
    returned["traffic"] = {"/".join(key): list(count) for key, count in communicator.traffic}
    return returned


def one_process(
    name: str, *, rows: int = ROWS, ranks: int = 2, bias: bool = False
) -> dict[str, Any]:
    """The same steps in one process: each rank's weights on all rows, their results added."""
    data, chosen = Data(rows, ranks), RECIPES[name]()
    mlps = [new_mlp(FFN // ranks, bias=bias) for _ in range(ranks)]
    for rank, mlp in enumerate(mlps):
        fill(mlp, data, rank)
        if bias:
            mlp.fc2_bias.data.zero_()
    returned: dict[str, Any] = {}
    for step in range(3):
        x = data.x[step].clone().requires_grad_()
        for mlp in mlps:
            mlp.zero_grad(set_to_none=True)
        with emulated(name), autocast(enabled=chosen is not None, recipe=chosen):
            parts = []
            for mlp in mlps:
                torch.manual_seed(step)
                parts.append(mlp(x))
            if name == "delayed":
                equal_amaxes(mlps, "fwd")
        y = parts[0].detach()
        for part in parts[1:]:
            y = y + part.detach()
        if bias:
            y = y + data.b2
        if name == "delayed":
            x.register_hook(lambda grad: equal_amaxes(mlps, "bwd"))
        torch.autograd.backward(parts, [data.dy[step]] * ranks)
        returned = {"y": y}
        for key, _ in mlps[0].named_parameters():
            returned[key] = [getattr(mlp, key).grad for mlp in mlps]
    return returned


def equal_amaxes(mlps: list[Any], direction: str) -> None:
    newest = [getattr(mlp, f"amax_history_{direction}")[0] for mlp in mlps]
    largest = torch.stack(newest).amax(0)
    for one in newest:
        one.copy_(largest)


def pair(communicator: Communicator, name: str) -> dict[str, Any]:
    """A column-parallel and a row-parallel linear on one rank: gradients of their input too."""
    rank, size = communicator.rank, communicator.size
    data, chosen = Data(ranks=size), RECIPES[name]()
    spread = {"tp_group": communicator, "sequence_parallel": True}
    column = new_linear(HIDDEN, FFN, parallel_mode="column", **spread)
    row = new_linear(FFN, HIDDEN, parallel_mode="row", **spread)
    with torch.no_grad():
        column.weight.copy_(data.w1.chunk(size)[rank])
        row.weight.copy_(data.w2.chunk(size, 1)[rank])
    x = data.x[0].chunk(size)[rank].clone().requires_grad_()
    communicator.traffic.clear()
    torch.manual_seed(1)
    with emulated(name), autocast(enabled=chosen is not None, recipe=chosen):
        y = row(column(x))
    y.backward(data.dy[0].chunk(size)[rank])
    counts = {"/".join(key): list(count) for key, count in communicator.traffic}
    return {"y": y.detach(), "dx": x.grad, "counts": counts}


def new_linear(*sizes: int, **arguments: Any) -> Any:
    fixed = {"bias": False, "params_dtype": torch.bfloat16, "device": device()}
    return fp8core.Linear(*sizes, **{**fixed, **arguments})


def pair_in_one_process(name: str, ranks: int = 2) -> dict[str, torch.Tensor]:
    data, chosen = Data(ranks=ranks), RECIPES[name]()
    parts, grads = [], []
    for rank in range(ranks):
        column, row = new_linear(HIDDEN, FFN // ranks), new_linear(FFN // ranks, HIDDEN)
        with torch.no_grad():
            column.weight.copy_(data.w1.chunk(ranks)[rank])
            row.weight.copy_(data.w2.chunk(ranks, 1)[rank])
        x = data.x[0].clone().requires_grad_()
        torch.manual_seed(1)
        with emulated(name), autocast(enabled=chosen is not None, recipe=chosen):
            y = row(column(x))
        y.backward(data.dy[0])
        parts.append(y.detach())
        grads.append(x.grad)
    return {"y": total(parts), "dx": total(grads)}


def total(parts: list[Any]) -> torch.Tensor:
    result: torch.Tensor = parts[0]
    for part in parts[1:]:
        result = result + part
    return result


def refusals(communicator: Communicator) -> dict[str, str]:
    """What each rank is told of what does not fit."""
    told: dict[str, str] = {}
    spread = {"tp_group": communicator, "sequence_parallel": True, "parallel_mode": "column"}
    rank = communicator.rank

    def try_(case: str, run: Callable[[], Any]) -> None:
        try:
            run()
        except fp8core.Fp8CoreError as error:
            told[case] = f"{type(error).__name__}: {error}"

    def call(layer: Any, chosen: Any, rows: int = 32) -> Any:
        with autocast(enabled=chosen is not None, recipe=chosen):
            return layer(torch.zeros(rows, HIDDEN, dtype=torch.bfloat16, device=device()))

    layer = new_linear(HIDDEN, FFN, **spread)
    chosen = [recipe.Float8BlockScaling(), recipe.MXFP8BlockScaling()]
    try_("recipes", lambda: call(layer, chosen[rank]))
    y = call(layer, chosen[0])
    told["after the recipes"] = str(list(y.shape))
    sizes = new_linear(HIDDEN, FFN * (1 + rank), **spread)
    try_("layers", lambda: call(sizes, None))
    scaled = new_linear(HIDDEN, FFN, **spread)
    call(scaled, recipe.DelayedScaling())
    if rank:
        scaled.scale_fwd.fill_(2.0)
    scaled.unbind()
    try_("delayed scales", lambda: call(scaled, recipe.DelayedScaling()))
    row = new_linear(HIDDEN, FFN, **{**spread, "parallel_mode": "row"})
    in_row = torch.zeros(33, HIDDEN // 2, dtype=torch.bfloat16, device=device())
    try_("rows", lambda: row(in_row))
    try_("rows of one rank", lambda: call(new_linear(HIDDEN, FFN, **spread), None, 32 + 32 * rank))
    try_("features", lambda: new_linear(HIDDEN, FFN + 1, **spread))
    late = new_linear(HIDDEN, FFN, tp_size=2, sequence_parallel=True, parallel_mode="column")
    try_("no group", lambda: call(late, None))
    late.set_tensor_parallel_group(communicator)
    told["group set late"] = str(list(call(late, None).shape))
    larger = new_linear(HIDDEN, 3 * FFN, tp_size=3, parallel_mode="column")
    try_("size of the group", lambda: larger.set_tensor_parallel_group(communicator))
    propagating = recipe.Float8BlockScaling(nonfinite="propagate")
    try_("propagate", lambda: call(layer, propagating))
    x = torch.zeros(4, HIDDEN, dtype=torch.bfloat16, device=device(), requires_grad=True)
    (grad,) = torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    try_("second derivative", lambda: grad.sum().backward())
    return told


def program(communicator: Communicator) -> dict[str, Any]:
    returned: dict[str, Any] = {"refused": refusals(communicator)}
    for name in RECIPES:
        returned[f"{name} sequence"] = parallel_mlp(communicator, name, sequence=True)
        returned[f"{name} replicated"] = parallel_mlp(communicator, name, sequence=False)
        returned[f"{name} pair"] = pair(communicator, name)
    returned["current bias"] = parallel_mlp(communicator, "current", sequence=True, bias=True)
    returned["block uneven"] = parallel_mlp(communicator, "block", sequence=True, rows=72)
    return returned


def over_gloo(rank: int) -> dict[str, Any]:
    return program(of_group(None))


FOUR = ("none", "current", "rowwise", "block", "mxfp8")


def over_four(rank: int) -> dict[str, float]:
    """How far results of four ranks are from those of one process, by recipe and tensor."""
    communicator, errors = of_group(None), {}
    for name in FOUR:
        found, judge = pair(communicator, name), pair_in_one_process(name, ranks=4)
        for key in ("y", "dx"):
            expected = judge[key].chunk(4)[rank].float()
            errors[f"{name} {key}"] = float((found[key] - expected).norm() / expected.norm())
    return errors


@pytest.fixture(scope="module", params=["processes", "threads"])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    if request.param == "threads":
        return run_in_threads(program, 2)
    return run_ranks(over_gloo, tmp_path_factory.mktemp("parallel"))


def check(ranks: list[dict[str, Any]], case: str, judge: dict[str, Any], *, split: bool) -> None:
    found = [one[case] if case else one for one in ranks]
    whole = torch.cat([one["y"] for one in found]) if split else found[0]["y"]
    assert torch.equal(whole, judge["y"])
    if not split:
        assert torch.equal(found[1]["y"], judge["y"])
    for name in ("fc1_weight", "fc2_weight"):
        for one, grad in zip(found, judge[name], strict=True):
            assert torch.equal(one[name], grad), name


def test_sequence_parallel_equals_one_process(ranks: list[dict[str, Any]]) -> None:
    for name in EXACT:
        check(ranks, f"{name} sequence", one_process(name), split=True)


def test_tensor_parallel_equals_one_process(ranks: list[dict[str, Any]]) -> None:
    for name in EXACT:
        check(ranks, f"{name} replicated", one_process(name), split=False)


def test_a_bias_is_added_once_after_the_sum(ranks: list[dict[str, Any]]) -> None:
    judge = one_process("current", bias=True)
    check(ranks, "current bias", judge, split=True)
    grads = [one["current bias"]["fc2_bias"] for one in ranks]
    rows = Data().dy[2].chunk(2)
    for grad, dy in zip(grads, rows, strict=True):
        assert torch.equal(grad, dy.float().sum(0).to(torch.bfloat16))


def test_blocks_that_ranks_would_share_travel_in_high_precision(
    ranks: list[dict[str, Any]],
) -> None:
    check(ranks, "block uneven", one_process("block", rows=72), split=True)
    sent = ranks[0]["block uneven"]["traffic"]
    assert sent["gather/input"] == [1, 36 * HIDDEN * 2]


def test_gradients_of_the_input_equal_one_process(ranks: list[dict[str, Any]]) -> None:
    for name in EXACT:
        judge = pair_in_one_process(name)
        found = [one[f"{name} pair"] for one in ranks]
        for key in ("y", "dx"):
            assert torch.equal(torch.cat([one[key] for one in found]), judge[key]), key


TABLE = {"none": 10, "current": 7, "rowwise": 8.06, "block": 8.13, "mxfp8": 8.13, "nvfp4": 6.25}
"""Bytes an element of a column and a row linear with as many features, forward and backward."""
AMAXES = {"current": 8 + 8, "rowwise": 4 * 2 * HIDDEN, "nvfp4": 8 + 8}
"""Bytes of the amaxes that are reduced before the two casts."""


def test_bytes_on_the_wire_are_those_of_the_table(ranks: list[dict[str, Any]]) -> None:
    for name in TABLE:
        counts = {
            key: sent
            for key, (_, sent) in ranks[0][f"{name} pair"]["counts"].items()
            if key != "max/amax"
        }
        per_element = sum(counts.values()) / (ROWS // 2 * HIDDEN)
        assert per_element == pytest.approx(TABLE[name], rel=0.01), name
        amaxes = ranks[0][f"{name} pair"]["counts"].get("max/amax", [0, 0])[1]
        assert amaxes <= AMAXES.get(name, 0), name


def test_delayed_scales_are_equal_without_a_reduction_group(ranks: list[dict[str, Any]]) -> None:
    first, second = (one["delayed pair"]["counts"] for one in ranks)
    assert first == second
    assert first["max/delayed amax"][0] > 0


def told(ranks: list[dict[str, Any]], case: str) -> list[str]:
    return [one["refused"][case] for one in ranks]


def test_what_does_not_fit_is_told_to_every_rank(ranks: list[dict[str, Any]]) -> None:
    for case, message in [
        ("recipes", "in the layer Linear(256, 256). rank 0: recipe: input e4m3 block=(1,128)"),
        ("layers", "out_features=256"),
        ("delayed scales", "delayed scales: [1.0"),
        ("rows", "do not divide 33 rows"),
        (
            "rows of one rank",
            "differ in a call of Linear(256, 256). rank 0: an input of [32, 256], gradients",
        ),
        ("features", "Linear(out_features=513): the 2 ranks of its group do not divide it"),
        ("no group", "call set_tensor_parallel_group before its first forward"),
        ("size of the group", "the group has 2 ranks, but the layer was made for tp_size=3"),
        ("propagate", "nonfinite='saturate' works there"),
        ("second derivative", "over several ranks"),
    ]:
        assert [message in one for one in told(ranks, case)] == [True, True], told(ranks, case)


class Tracker:
    """As Megatron's: notes under which name a fork is open."""

    def __init__(self) -> None:
        self.open: list[str] = []

    @contextlib.contextmanager
    def fork(self, name: str = "model-parallel-rng") -> Iterator[None]:
        self.open.append(name)
        yield
        self.open.pop()


def test_weights_are_filled_within_the_tracker_s_fork() -> None:
    tracker, seen = Tracker(), []

    def init(weight: torch.Tensor) -> None:
        seen.append((tuple(weight.shape), list(tracker.open)))
        torch.nn.init.ones_(weight)

    given = {"get_rng_state_tracker": lambda: tracker, "init_method": init}
    new_linear(8, 4, tp_size=2, parallel_mode="column", rng_tracker_name="expert", **given)
    new_mlp(8, tp_size=2, set_parallel_mode=True, output_layer_init_method=init, **given)
    forked = ["model-parallel-rng"]
    assert seen == [
        ((2, 8), ["expert"]),
        ((4, HIDDEN), forked),
        ((HIDDEN, 4), forked),
    ]


def test_parameters_carry_the_attributes_that_megatron_reads() -> None:
    mlp = new_mlp(8, bias=True, tp_size=2, sequence_parallel=True, set_parallel_mode=True)
    split = {
        name: one.partition_dim
        for name, one in mlp.named_parameters()
        if getattr(one, "tensor_model_parallel", False)
    }
    assert split == {"fc1_weight": 0, "fc1_bias": 0, "fc2_weight": 1}
    summed = [n for n, one in mlp.named_parameters() if getattr(one, "sequence_parallel", False)]
    assert summed == ["layer_norm_weight", "fc2_bias"]


def test_a_copy_of_a_layer_keeps_its_group() -> None:
    ranks = communicators(2)
    layer = new_linear(8, 4, tp_group=ranks[1], parallel_mode="row")
    again = copy.deepcopy(layer)
    assert again.tp_group is ranks[1]
    assert (again.tp_size, again.parallel_mode, again.sequence_parallel) == (2, "row", False)


def test_a_layer_works_after_a_refusal(ranks: list[dict[str, Any]]) -> None:
    assert told(ranks, "after the recipes") == ["[64, 256]"] * 2
    assert told(ranks, "group set late") == ["[64, 256]"] * 2


def test_four_ranks_equal_one_process_where_sums_have_its_order() -> None:
    for name in ("none", "current", "rowwise", "block", "mxfp8"):
        parts = run_in_threads(lambda one, name=name: parallel_mlp(one, name, sequence=True), 4)
        judge = one_process(name, ranks=4)
        check(parts, "", judge, split=True)


def test_stochastic_gradients_are_as_near_as_those_of_one_process(
    ranks: list[dict[str, Any]],
) -> None:
    """Each rank draws its noise for its rows: results differ, by rounding alone."""
    for key in ["dx", "y"]:
        exact, alone = pair_in_one_process("none")[key].float(), pair_in_one_process("nvfp4")[key]
        found = torch.cat([one["nvfp4 pair"][key] for one in ranks])
        errors = [(one.float() - exact).norm() for one in (found, alone)]
        assert errors[0] <= 1.05 * errors[1], key
        assert (key == "y") == torch.equal(found, alone), key


def test_four_processes_differ_by_the_order_of_bfloat16_sums_alone(tmp_path: Path) -> None:
    """Three roundings of a sum of four: two of them in another order."""
    for errors in run_ranks(over_four, tmp_path, world_size=4):
        assert len(errors) == 2 * len(FOUR)
        assert max(errors.values()) < 0.004, errors


def with_rows(communicator: Communicator, mode: str, leading: tuple[int, ...]) -> torch.Tensor:
    """What a layer with sequence parallelism returns for an input of ``leading`` dimensions."""
    given: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": device()}
    layer = fp8core.Linear(
        64, 64, tp_group=communicator, sequence_parallel=True, parallel_mode=mode, **given
    )
    x = torch.ones(*leading, layer.in_features, device=device()).bfloat16().requires_grad_()
    y: torch.Tensor = layer(x)
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.shape == x.shape
    return y


def test_a_first_dimension_that_the_ranks_do_not_divide_is_named() -> None:
    def said(communicator: Communicator) -> str:
        with pytest.raises(OperandError) as caught:
            with_rows(communicator, "row", (9, 4))
        return str(caught.value)

    messages = run_in_threads(said, 2)
    assert all("split the first dimension, here 9" in one for one in messages)


def test_inputs_without_rows_are_gathered_and_scattered() -> None:
    for mode, leading, expected in [
        ("column", (8, 0), [16, 0, 32]),
        ("column", (0, 8), [0, 8, 32]),
        ("row", (8, 0), [4, 0, 64]),
        ("row", (0,), [0, 64]),
    ]:
        results = run_in_threads(functools.partial(with_rows, mode=mode, leading=leading), 2)
        assert [list(one.shape) for one in results] == [expected] * 2, (mode, leading)
