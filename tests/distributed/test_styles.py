"""Styles of ``parallelize_module`` against the same shards in threads of one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import fp8core
from fp8core import distributed, recipe
from fp8core.collectives import Communicator
from fp8core.distributed import ColwiseParallel, RowwiseParallel, SequenceParallel
from fp8core.errors import OperandError, UnsupportedError
from tests.distributed.programs import raised
from tests.in_process import run_in_threads
from tests.ranks import device, emulated, run_ranks

HIDDEN, FFN, ROWS, BATCH = 128, 256, 64, 2
RECIPES: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "current": recipe.Float8CurrentScaling,
    "rowwise": recipe.Float8RowwiseScaling,
    "block": recipe.Float8BlockScaling,
    "mxfp8": recipe.MXFP8BlockScaling,
    "delayed": lambda: recipe.DelayedScaling(amax_history_len=4),
}
PARAMETERS = ("norm.weight", "ffn.up.weight", "ffn.up.bias", "ffn.down.weight", "ffn.down.bias")


def values(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator).to(device())
    return (
        x * torch.linspace(0.5, 4, shape[0], device=device()).reshape(-1, *[1] * (len(shape) - 1))
    ).bfloat16()


def input_of(step: int, replica: int = 0) -> torch.Tensor:
    return values(ROWS, BATCH, HIDDEN, seed=100 * replica + step)


def gradient_of(step: int, replica: int = 0) -> torch.Tensor:
    return values(ROWS, BATCH, HIDDEN, seed=1000 + 100 * replica + step)


class FeedForward(torch.nn.Module):
    def __init__(self, up: torch.nn.Module, down: torch.nn.Module) -> None:
        super().__init__()
        self.up, self.down = up, down

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.nn.functional.gelu(self.up(x)))
        return result


class Block(torch.nn.Module):
    def __init__(self, norm: torch.nn.Module, ffn: FeedForward) -> None:
        super().__init__()
        self.norm, self.ffn = norm, ffn

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.ffn(self.norm(x))
        return result


def fill(block: Block, rank: int | None = None) -> Block:
    """Fill a block with the whole parameters, or with the share of a rank of two."""
    whole = {
        "norm.weight": values(HIDDEN, seed=1),
        "ffn.up.weight": values(FFN, HIDDEN, seed=2) * 0.05,
        "ffn.up.bias": values(FFN, seed=3),
        "ffn.down.weight": values(HIDDEN, FFN, seed=4) * 0.05,
        "ffn.down.bias": values(HIDDEN, seed=5),
    }
    dims = {"ffn.up.weight": 0, "ffn.up.bias": 0, "ffn.down.weight": 1}
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            value = whole[name]
            if rank is not None and name in dims:
                value = value.chunk(2, dims[name])[rank]
            parameter.copy_(value)
    return block


def native() -> Block:
    given: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": device()}
    up, down = fp8core.Linear(HIDDEN, FFN, **given), fp8core.Linear(FFN, HIDDEN, **given)
    return fill(Block(fp8core.RMSNorm(HIDDEN, **given), FeedForward(up, down)))


def converted() -> Block:
    given: dict[str, Any] = {"dtype": torch.bfloat16}
    up, down = torch.nn.Linear(HIDDEN, FFN, **given), torch.nn.Linear(FFN, HIDDEN, **given)
    block = fill(Block(torch.nn.RMSNorm(HIDDEN, eps=1e-5, **given), FeedForward(up, down)))
    fp8core.convert(block, filter=lambda module, name: True)
    return block


def spread(block: Block, mesh: DeviceMesh, dim: int = 0) -> Block:
    plan = {
        "norm": distributed.SequenceParallel(sequence_dim=dim),
        "ffn": distributed.PrepareModuleInput(
            input_layouts=(Shard(dim),), desired_input_layouts=(Replicate(),)
        ),
        "ffn.up": distributed.ColwiseParallel(),
        "ffn.down": distributed.RowwiseParallel(output_layouts=Shard(dim)),
    }
    parallelize_module(block, mesh, plan)
    return block


def by_arguments(group: Communicator) -> Block:
    given: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": device()}
    spread_over: dict[str, Any] = {"tp_group": group, "sequence_parallel": True}
    up = fp8core.Linear(HIDDEN, FFN, parallel_mode="column", **given, **spread_over)
    down = fp8core.Linear(FFN, HIDDEN, parallel_mode="row", **given, **spread_over)
    block = Block(fp8core.RMSNorm(HIDDEN, **given), FeedForward(up, down))
    return fill(block, group.rank)


def step(block: Block, name: str, x: torch.Tensor, dy: torch.Tensor) -> dict[str, torch.Tensor]:
    """One forward and backward pass: the output, and the gradients that this rank has."""
    x = x.clone().requires_grad_()
    chosen = RECIPES[name]()
    with emulated(name), fp8core.autocast(enabled=chosen is not None, recipe=chosen):
        y = block(x)
    y.backward(dy)
    results = {"y": y.detach(), "dx": x.grad}
    for parameter_name, parameter in block.named_parameters():
        grad = parameter.grad
        results[parameter_name] = grad.to_local() if isinstance(grad, DTensor) else grad
        parameter.grad = None
    return {key: value.clone() for key, value in results.items() if value is not None}


def mine(x: torch.Tensor, rank: int, dim: int = 0) -> torch.Tensor:
    return x.chunk(2, dim)[rank].contiguous()


def judge(group: Communicator, name: str, steps: int = 2) -> list[dict[str, torch.Tensor]]:
    """What layers with Transformer Engine's arguments compute for the same shards."""
    block, results = by_arguments(group), []
    for at in range(steps):
        part = [mine(one, group.rank) for one in (input_of(at), gradient_of(at))]
        result = step(block, name, *part)
        for summed in ("norm.weight", "ffn.down.bias"):  # each rank saw some of the rows
            result[summed] = group.sum(result[summed]).wait()
        results.append(result)
    return results


def fused(**arguments: Any) -> FeedForward:
    """A feed-forward network whose first linear has the norm inside."""
    given: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": device()}
    column, row = (arguments | {"parallel_mode": mode} for mode in ("column", "row"))
    if not arguments:
        column, row = {}, {}
    up = fp8core.LayerNormLinear(HIDDEN, FFN, **given, **column)
    return FeedForward(up, fp8core.Linear(FFN, HIDDEN, **given, **row))


def fill_fused(block: FeedForward, rank: int | None = None) -> FeedForward:
    up, down = fill(native()).ffn.up, fill(native()).ffn.down
    state = {f"up.{name}": one for name, one in up.state_dict().items()}
    state |= {f"down.{name}": one for name, one in down.state_dict().items()}
    state |= {f"up.layer_norm_{name}": values(HIDDEN, seed=6) for name in ("weight", "bias")}
    dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            value = state[name]
            if rank is not None and name in dims:
                value = value.chunk(2, dims[name])[rank]
            parameter.copy_(value)
    return block


def fused_step(block: Any, rank: int, sequence: bool) -> dict[str, torch.Tensor]:
    given = input_of(0), gradient_of(0)
    x, dy = (mine(one, rank) for one in given) if sequence else given
    return step(block, "block", x, dy)


def fused_judge(group: Communicator, sequence: bool) -> dict[str, torch.Tensor]:
    block = fill_fused(fused(tp_group=group, sequence_parallel=sequence), group.rank)
    result = fused_step(block, group.rank, sequence)
    if sequence:
        for name in ("up.layer_norm_weight", "up.layer_norm_bias", "down.bias"):
            result[name] = group.sum(result[name]).wait()
    return result


def fused_by_styles(rank: int, mesh: DeviceMesh, sequence: bool) -> dict[str, torch.Tensor]:
    layout = Shard(0) if sequence else Replicate()
    plan = {
        "up": distributed.ColwiseParallel(input_layouts=layout),
        "down": distributed.RowwiseParallel(output_layouts=layout),
    }
    block = parallelize_module(fill_fused(fused()), mesh, plan)
    return fused_step(block, rank, sequence)


def refusals(mesh: DeviceMesh) -> dict[str, str]:
    """What each rank is told about what does not fit."""
    given: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": device()}

    def styled(layer: torch.nn.Module, style: Any) -> torch.nn.Module:
        return parallelize_module(layer, mesh, style)

    column, row = distributed.ColwiseParallel, distributed.RowwiseParallel
    odd, mlp = fp8core.Linear(64, 33, **given), fp8core.LayerNormMLP(64, 64, **given)
    spread_linear = styled(fp8core.Linear(64, 64, **given), row())
    replicated = DTensor.from_local(values(4, 64, seed=0), mesh, [Shard(0)], run_check=False)
    columns = DTensor.from_local(values(4, 64, seed=0), mesh, [Shard(1)], run_check=False)
    column_linear = styled(fp8core.Linear(64, 64, **given), column())
    return {
        "odd": raised(lambda: styled(odd, column())),
        "odd_is_whole": str(list(odd.weight.shape)),
        "mlp": raised(lambda: styled(mlp, column())),
        "norm": raised(lambda: styled(mlp, distributed.SequenceParallel())),
        "output": raised(
            lambda: styled(fp8core.Linear(64, 64, **given), row(output_layouts=Shard(2)))
        ),
        "rows": raised(lambda: spread_linear(replicated)),
        "columns": raised(lambda: column_linear(columns)),
        "twice": raised(lambda: styled(column_linear, column())),
    }


def two_ranks(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh(device().type, (2,), mesh_dim_names=("tp",))
    results: dict[str, Any] = {}
    for kind, make in (("native", native), ("converted", converted)):
        for name in RECIPES:
            block = spread(make(), mesh)
            results[f"{kind}_{name}"] = [
                step(block, name, mine(input_of(at), rank), mine(gradient_of(at), rank))
                for at in range(2)
            ]
    results["placements"] = {
        name: str(one.placements) for name, one in block.state_dict().items() if name in PARAMETERS
    }
    batch_first = spread(native(), mesh, dim=1)
    given = (input_of(0), gradient_of(0))
    parts = [mine(one, rank).transpose(0, 1).contiguous() for one in given]
    results["batch_first"] = [step(batch_first, "current", *parts)]
    for sequence in (False, True):
        results[f"fused_{sequence}"] = fused_by_styles(rank, mesh, sequence)
    results["refusals"] = refusals(mesh)
    return results


def four_ranks(rank: int) -> dict[str, Any]:
    """Training on two by two ranks, with weights gathered in high precision, and quantized."""
    mesh = init_device_mesh(device().type, (2, 2), mesh_dim_names=("dp", "tp"))
    return {kind: train_sharded(mesh, kind == "quantized") for kind in ("plain", "quantized")}


def train_sharded(mesh: DeviceMesh, quantized: bool) -> dict[str, Any]:
    """Two steps of SGD with tensor parallelism of two by FSDP2 of two."""
    block = spread(native(), mesh["tp"])
    if quantized:
        distributed.gather_quantized(block, recipe.Float8CurrentScaling())
    fully_shard(block.ffn, mesh=mesh["dp"])
    fully_shard(block, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(block.parameters(), lr=0.01)
    replica, part = mesh["dp"].get_local_rank(), mesh["tp"].get_local_rank()
    for at in range(2):
        with fp8core.autocast(recipe=recipe.Float8CurrentScaling()):
            y = block(mine(input_of(at, replica), part))
        y.backward(mine(gradient_of(at, replica), part))
        optimizer.step()
        optimizer.zero_grad()
    full = {name: one.full_tensor().detach() for name, one in block.named_parameters()}
    return {"y": y.detach(), **full}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(two_ranks, tmp_path_factory.mktemp("ranks"))


@functools.cache
def judged(name: str) -> list[list[dict[str, torch.Tensor]]]:
    return run_in_threads(lambda group: judge(group, name), 2)


@pytest.mark.parametrize("kind", ["native", "converted"])
@pytest.mark.parametrize("name", RECIPES)
def test_styles_equal_one_process_on_the_same_shards(
    ranks: list[Any], kind: str, name: str
) -> None:
    for rank, wanted in enumerate(judged(name)):
        for result, want in zip(ranks[rank][f"{kind}_{name}"], wanted, strict=True):
            assert result.keys() == want.keys()
            different = [key for key in want if not torch.equal(result[key], want[key])]
            assert not different


def test_batch_first_shards_equal_those_of_the_sequence(ranks: list[Any]) -> None:
    for rank, wanted in enumerate(judged("current")):
        (result,) = ranks[rank]["batch_first"]
        want = dict(wanted[0])
        want |= {key: want[key].transpose(0, 1) for key in ("y", "dx")}
        # The operands of this wgrad have other strides, and its float32 sums another order.
        one, other = (given.pop("ffn.up.weight").float() for given in (result, want))
        bound = ROWS * BATCH * 2.0**-24 * float(other.abs().max())
        assert torch.allclose(one, other, rtol=2.0**-7, atol=bound)
        assert not [key for key in want if not torch.equal(result[key], want[key])]


def test_a_norm_inside_equals_one_process(ranks: list[Any]) -> None:
    for sequence in [False, True]:
        wanted = run_in_threads(functools.partial(fused_judge, sequence=sequence), 2)
        for rank, want in enumerate(wanted):
            result = ranks[rank][f"fused_{sequence}"]
            assert result.keys() == want.keys(), sequence
            assert not [key for key in want if not torch.equal(result[key], want[key])], sequence


def test_parameters_are_dtensors(ranks: list[Any]) -> None:
    shard0, shard1, whole = "(Shard(dim=0),)", "(Shard(dim=1),)", "(Replicate(),)"
    assert ranks[0]["placements"] == dict(
        zip(PARAMETERS, (whole, shard0, shard0, shard1, whole), strict=True)
    )


def test_what_does_not_fit_is_named_on_every_rank(ranks: list[Any]) -> None:
    for case, text in [
        ("odd", "OperandError: ColwiseParallel of Linear(64, 33)"),
        ("mlp", "UnsupportedError: ColwiseParallel of LayerNormMLP"),
        ("norm", "UnsupportedError: SequenceParallel of LayerNormMLP"),
        ("output", "OperandError: RowwiseParallel of Linear(64, 64): S(2) of its rows"),
        ("rows", "OperandError: RowwiseParallel of Linear(32, 64): the input lies as S(0)"),
        ("columns", "OperandError: ColwiseParallel of Linear(64, 32): S(1) of its rows"),
        ("twice", "OperandError: ColwiseParallel of Linear(64, 32): the layer is spread"),
    ]:
        assert [one["refusals"][case].startswith(text) for one in ranks] == [True, True], ranks[0][
            "refusals"
        ][case]


def test_a_refused_layer_stays_whole(ranks: list[Any]) -> None:
    assert [one["refusals"]["odd_is_whole"] for one in ranks] == ["[33, 64]"] * 2


def trained(group: Communicator) -> dict[str, torch.Tensor]:
    """The judge of four ranks: two replicas whose gradients are averaged, in each of two shards."""
    block = by_arguments(group)
    for at in range(2):
        outputs, total = [], {name: torch.zeros_like(one) for name, one in block.named_parameters()}
        for replica in range(2):
            with fp8core.autocast(recipe=recipe.Float8CurrentScaling()):
                y = block(mine(input_of(at, replica), group.rank))
            y.backward(mine(gradient_of(at, replica), group.rank))
            outputs.append(y.detach())
            for name, parameter in block.named_parameters():
                grad = parameter.grad
                assert grad is not None
                if name in ("norm.weight", "ffn.down.bias"):
                    grad = group.sum(grad).wait()
                total[name] += grad / 2
                parameter.grad = None
        with torch.no_grad():
            for name, parameter in block.named_parameters():
                parameter.add_(total[name], alpha=-0.01)
    result = {name: one.detach() for name, one in block.named_parameters()}
    return {"y0": outputs[0], "y1": outputs[1], **result}


@pytest.fixture(scope="module")
def sharded_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(four_ranks, tmp_path_factory.mktemp("four"), world_size=4)


def test_two_by_two_with_fsdp2_equals_one_process(sharded_ranks: list[Any]) -> None:
    for kind in ["plain", "quantized"]:
        wanted = run_in_threads(trained, 2)
        for rank, result in enumerate(sharded_ranks):
            assert torch.equal(result[kind]["y"], wanted[rank % 2][f"y{rank // 2}"]), kind
        dims = {"ffn.up.weight": 0, "ffn.up.bias": 0, "ffn.down.weight": 1}
        for name in PARAMETERS:
            parts = [want[name] for want in wanted]
            whole = torch.cat(parts, dims[name]) if name in dims else parts[0]
            assert torch.equal(sharded_ranks[0][kind][name], whole), name


GIVEN: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": device()}


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh(device().type, (2,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def linear(**given: Any) -> fp8core.Linear:
    return fp8core.Linear(64, 128, **GIVEN, **given)


def test_a_partial_output_of_columns_is_refused_before_a_change(mesh: DeviceMesh) -> None:
    layer = linear()
    with pytest.raises(OperandError, match=r"ColwiseParallel of Linear\(64, 128\): .*P\(sum\)"):
        parallelize_module(layer, mesh, ColwiseParallel(output_layouts=Partial()))
    assert type(layer.weight) is torch.nn.Parameter


def test_an_output_dimension_that_the_input_lacks_is_refused(mesh: DeviceMesh) -> None:
    layer = parallelize_module(linear(), mesh, ColwiseParallel(output_layouts=Shard(5)))
    with pytest.raises(OperandError, match=r"output_layouts=S\(5\).*2 dimensions"):
        layer(torch.ones(4, 64).bfloat16())


def test_an_input_that_is_no_tensor_is_named(mesh: DeviceMesh) -> None:
    for style in [ColwiseParallel, RowwiseParallel]:
        layer = parallelize_module(linear(), mesh, style())
        with pytest.raises(OperandError, match="input is str"):
            layer("text")
        with pytest.raises(TypeError, match="missing 1 required positional argument: 'input'"):
            layer()


def test_a_parametrized_weight_is_refused_before_a_change(mesh: DeviceMesh) -> None:
    layer = torch.nn.utils.parametrizations.weight_norm(linear())
    with pytest.raises(UnsupportedError, match="computed from other parameters"):
        parallelize_module(layer, mesh, ColwiseParallel())
    assert type(layer.bias) is torch.nn.Parameter


def test_a_parametrized_norm_is_refused(mesh: DeviceMesh) -> None:
    norm = fp8core.RMSNorm(64, **GIVEN)
    torch.nn.utils.parametrize.register_parametrization(norm, "weight", torch.nn.Identity())
    with pytest.raises(UnsupportedError, match="computed from other parameters"):
        parallelize_module(norm, mesh, SequenceParallel())


@pytest.mark.parametrize(
    "style",
    [ColwiseParallel(output_layouts=Replicate()), ColwiseParallel(use_local_output=False)],
    ids=["gathered", "as a DTensor"],
)
def test_parts_of_a_weight_are_not_joined_in_another_order(mesh: DeviceMesh, style: Any) -> None:
    with pytest.raises(OperandError, match=r"parameters_split.*use_local_output=True"):
        parallelize_module(linear(parameters_split=("q", "k")), mesh, style)


def test_a_parameter_that_lies_otherwise_is_refused(mesh: DeviceMesh) -> None:
    columns = parallelize_module(linear(), mesh, ColwiseParallel())
    tied = linear()
    tied.weight = columns.weight
    with pytest.raises(OperandError, match=r"weight lies as \(Shard\(dim=0\),\)"):
        parallelize_module(tied, mesh, RowwiseParallel())
    assert type(tied.bias) is torch.nn.Parameter


def test_a_parameter_that_lies_as_wanted_stays_tied(mesh: DeviceMesh) -> None:
    first = parallelize_module(linear(), mesh, ColwiseParallel())
    second = linear()
    second.weight = first.weight
    parallelize_module(second, mesh, ColwiseParallel())
    assert second.weight is first.weight


@pytest.mark.usefixtures("mesh")
def test_a_rank_outside_of_the_mesh_is_told_so() -> None:
    with pytest.raises(OperandError, match="this rank is not in"):
        parallelize_module(linear(), DeviceMesh(device().type, [1]), ColwiseParallel())


def test_a_norm_is_spread_once(mesh: DeviceMesh) -> None:
    norm = parallelize_module(fp8core.RMSNorm(64, **GIVEN), mesh, SequenceParallel())
    with pytest.raises(OperandError, match=r"spread .*already"):
        parallelize_module(norm, mesh, SequenceParallel())


@pytest.mark.parametrize("dim", [-1, 1, 7])
def test_a_norm_takes_whole_rows(mesh: DeviceMesh, dim: int) -> None:
    norm = fp8core.RMSNorm(64, **GIVEN)
    with pytest.raises(OperandError, match=r"SequenceParallel of RMSNorm: .*a dimension before"):
        parallelize_module(norm, mesh, SequenceParallel(sequence_dim=dim))(
            torch.ones(4, 64).bfloat16()
        )


def test_a_norm_keeps_the_size_of_uneven_shards(mesh: DeviceMesh) -> None:
    norm = parallelize_module(fp8core.RMSNorm(64, **GIVEN), mesh, SequenceParallel(sequence_dim=0))
    y: Any = norm(distribute_tensor(torch.ones(9, 64).bfloat16(), mesh, [Shard(0)]))
    assert isinstance(y, DTensor)
    assert list(y.shape) == [9, 64]
    assert list(y.to_local().shape) == [5, 64]
