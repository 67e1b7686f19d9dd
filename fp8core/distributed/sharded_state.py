"""Which part of the whole model's parameters a rank of a tensor-parallel model has.

:func:`shard_layout` states it, for frameworks with a checkpoint format of their own;
:func:`sharded_state_dict` gives the state as torch.distributed.checkpoint takes it, which then
loads it on another number of tensor-parallel ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fp8core.errors import UnsupportedError
from fp8core.modules.attention import DotProductAttention
from fp8core.modules.layers.layernorm_mlp import LayerNormMLP
from fp8core.modules.layers.parallel import ParallelModule
from fp8core.modules.multihead_attention import MultiheadAttention
from fp8core.tensors.quantized_tensor import QuantizedTensor


class ShardLayout(NamedTuple):
    """The part of a tensor that rank ``rank`` of ``num_ranks`` has, from row or column
    ``offset[axis]`` on.

    ``key`` names the whole tensor, of ``shape``. ``start`` and ``length`` are the rows of the
    parameter that hold this part: a gated MLP's ``fc1`` holds parts of two tensors, a fused
    projection those of queries, keys and values. ``axis`` is None where each rank has the whole.
    """

    key: str
    axis: int | None
    rank: int
    num_ranks: int
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    start: int
    length: int


def shard_layout(model: torch.nn.Module) -> dict[str, tuple[ShardLayout, ...]]:
    """Return the parts that each parameter and buffer of ``model`` holds, by name.

    The layout follows from the ``tp_group`` and ``parallel_mode`` of fp8core's layers; parameters
    of other modules, norms and delayed scales are whole on each rank. A rank's experts are whole
    too, under names that no other rank has; their delayed scales are a part of those of all ranks'
    experts, as the ``state_dict`` gives them: ``[..., linears, experts, slots]``. Of Megatron's
    ``ShardedTensor.from_rank_offsets`` the arguments are ``key``, the tensor's rows from ``start``
    on, and ``(axis, rank, num_ranks)``.

    Raises:
        UnsupportedError: a layer with ``tp_size`` that has no group yet, or a parameter that is a
            DTensor: a DTensor of ``parallelize_module`` has its own placements, and a DTensor of
            ``fully_shard`` those of the data-parallel ranks alone.
    """
    layouts = _layouts(model)
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            raise UnsupportedError(
                f"shard_layout: {name} is a DTensor, which says itself how it is split: by its "
                f"device_mesh and placements. Save torch.distributed.checkpoint.state_dict."
                f"get_model_state_dict(model)."
            )
    return {name: tuple(parts) for name, (_, parts) in layouts.items()}


def sharded_state_dict(model: torch.nn.Module) -> dict[str, Any]:
    """Return the state of ``model`` for ``torch.distributed.checkpoint``, by the keys of
    :func:`shard_layout`.

    Parts are DTensors over their layer's group, and share memory with the model: ``dcp.save``
    writes the whole tensors, and ``dcp.load`` writes to the model, also to one with another
    ``tp_size``. Delayed scales need their buffers before a load, see :func:`fp8core.prepare`.
    Tensors that no rank splits are as in the model's ``state_dict``, extra states among them.

    Raises:
        UnsupportedError: a quantized parameter that is split, as its scales are those of a rank; or
            as :func:`shard_layout`.
    """
    layouts = _layouts(model)
    state: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        group, parts = layouts.get(name, (None, []))
        is_whole = len(parts) <= 1 and all(part.axis is None for part in parts)
        if is_whole or isinstance(value, DTensor):
            state[name] = value.detach() if isinstance(value, torch.Tensor) else value
            continue
        tensor = value.detach()
        _refuse(name, tensor)
        for part in parts:
            rows = tensor if len(parts) == 1 else tensor[part.start : part.start + part.length]
            state[part.key] = rows if part.axis is None else _distributed(rows, part.axis, group)
    return state


def _refuse(name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, QuantizedTensor):
        raise UnsupportedError(
            f"sharded_state_dict: {name} is stored quantized, by scales of this rank's part, and "
            f"the ranks of another model have other parts. Save the high-precision masters: "
            f"masters.state_dict() on each rank."
        )


def _refuse_sharded(name: str, parameter: DTensor, layer: ParallelModule) -> None:
    """Refuse a DTensor, by what it says of the ranks of the layer."""
    mesh, (_, size, group) = parameter.device_mesh, _ranks_of(layer)
    names = [mesh.get_group(at).group_name for at in range(mesh.ndim)]
    if group.group_name in names:
        raise UnsupportedError(
            f"sharded_state_dict: {name} is a DTensor, which says itself how it is split. Use "
            f"torch.distributed.checkpoint.state_dict.get_model_state_dict(model)."
        )
    raise UnsupportedError(
        f"sharded_state_dict: {name} is a DTensor over {names}, as fully_shard makes it, and says "
        f"nothing of the {size} ranks of the layer's tp_group, {group.group_name!r}: one "
        f"checkpoint of get_model_state_dict(model) would keep the parts of one of them alone. "
        f"Save one for each: dcp.save(state, checkpoint_id=f'{{path}}/{{tp_rank}}', "
        f"process_group=the ranks that fully_shard has). For a checkpoint that loads on other "
        f"numbers of tensor-parallel ranks spread the model by parallelize_module and the styles "
        f"of fp8core.distributed."
    )


def _distributed(rows: torch.Tensor, axis: int, group: Any) -> torch.Tensor:
    mesh = DeviceMesh.from_group(group, rows.device.type)
    return DTensor.from_local(rows, mesh, [Shard(axis)], run_check=False)


def _layouts(model: torch.nn.Module) -> dict[str, tuple[Any, list[ShardLayout]]]:
    """Return the group and the parts of each parameter and buffer, by name."""
    blocks: dict[str, tuple[int, ...]] = {}
    modules = [*model.named_modules(remove_duplicate=False)]  # each name of what is shared
    for path, module in modules:
        if isinstance(module, LayerNormMLP | MultiheadAttention):
            blocks |= {_joined(path, name): rows for name, rows in module.row_blocks().items()}
    saved = model.state_dict(keep_vars=True)
    layouts: dict[str, tuple[Any, list[ShardLayout]]] = {}
    for path, module in modules:
        split = _split_parameters(module)
        tensors = itertools.chain(
            module.named_parameters(recurse=False), module.named_buffers(recurse=False)
        )
        for name, tensor in tensors:
            key = _joined(path, name)
            as_saved: Any = saved.get(key, tensor)
            if isinstance(as_saved, DTensor) and not isinstance(tensor, DTensor):
                layouts[key] = None, [_part_of(key, as_saved)]
                continue
            axis, layer = split.get(name, (None, None))
            rank, size, group = (0, 1, None) if layer is None else _ranks_of(layer)
            shape = tuple(as_saved.shape)
            rows = blocks.get(key, shape[:1] or (1,))
            parts = _parts(key, shape, axis, (rank, size), rows)
            layouts[key] = group, list(parts)
    return layouts


def _part_of(key: str, scales: DTensor) -> ShardLayout:
    """Return the part of the delayed scales of experts, which their layer saves as a DTensor."""
    local, rank = scales.to_local(), scales.device_mesh.get_local_rank()
    axis = scales.dim() - 2
    offset = [0] * scales.dim()
    offset[axis] = rank * local.shape[axis]
    num_ranks, shape = scales.device_mesh.size(), tuple(scales.shape)
    return ShardLayout(key, axis, rank, num_ranks, shape, tuple(offset), 0, local.shape[0])


def _parts(
    name: str,
    shape: tuple[int, ...],
    axis: int | None,
    place: tuple[int, int],
    blocks: tuple[int, ...],
) -> Iterator[ShardLayout]:
    rank, size = place
    start = 0
    for at, length in enumerate(blocks):
        key = name if len(blocks) == 1 else f"{name}.{at}"
        local = (length, *shape[1:]) if shape else ()
        whole, offset = list(local), [0] * len(local)
        if axis is not None:
            whole[axis], offset[axis] = local[axis] * size, local[axis] * rank
        yield ShardLayout(key, axis, rank, size, tuple(whole), tuple(offset), start, length)
        start += length


def _split_parameters(module: torch.nn.Module) -> dict[str, tuple[int, ParallelModule]]:
    """Return the axis of each parameter that a parallel layer splits over its ranks."""
    if not isinstance(module, ParallelModule) or module.parallel.size == 1:
        return {}
    if isinstance(module, DotProductAttention):
        return {"softmax_offset": (0, module)}
    is_spread = module.parallel_mode is not None
    if isinstance(module, LayerNormMLP):
        is_spread = module.set_parallel_mode
    if not is_spread:
        return {}
    for name, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, DTensor):  # without the attributes of the parameter before
            _refuse_sharded(f"{module.label}.{name}", parameter, module)
    return {
        name: (parameter.partition_dim, module)  # type: ignore[attr-defined]  # beside the other
        for name, parameter in module.named_parameters(recurse=False)
        if getattr(parameter, "tensor_model_parallel", False)
    }


def _ranks_of(layer: ParallelModule) -> tuple[int, int, Any]:
    group: Any = layer.tp_group
    if group is None:
        raise UnsupportedError(
            f"{layer.label} was made for tp_size={layer.tp_size} and has no group yet. Give it one "
            f"by set_tensor_parallel_group(group)."
        )
    rank = group.rank if isinstance(group.rank, int) else group.rank()
    return rank, layer.parallel.size, group


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
