"""What styles of ``parallelize_module`` refuse by name, as a rank of a group without transport."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

import fp8core
from fp8core.distributed import ColwiseParallel, RowwiseParallel, SequenceParallel
from fp8core.errors import OperandError, UnsupportedError

GIVEN: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cpu"}


@pytest.fixture(autouse=True)
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
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


def test_a_rank_outside_of_the_mesh_is_told_so() -> None:
    with pytest.raises(OperandError, match="this rank is not in"):
        parallelize_module(linear(), DeviceMesh("cpu", [1]), ColwiseParallel())


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
