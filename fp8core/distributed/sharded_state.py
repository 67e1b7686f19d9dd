"""Which part of the whole model's parameters a rank of a tensor-parallel model has.

:func:`shard_layout` states it, for frameworks with a checkpoint format of their own;
:func:`sharded_state_dict` gives the state as torch.distributed.checkpoint takes it, which then
loads it on another number of tensor-parallel ranks.

A ``state_dict`` has the delayed scales of the experts of all ranks, by number of the expert. A
layer of experts holds the slots of its first linear's experts, then those of the next one's. They
are saved as ``[..., linears, experts, slots]``, a DTensor that ranks split along the experts, so
that a checkpoint loads on another number of ranks.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fp8core.collectives import Communicator
from fp8core.errors import UnsupportedError
from fp8core.modules.attention import DotProductAttention
from fp8core.modules.layers.layernorm_mlp import LayerNormMLP
from fp8core.modules.layers.parallel import ParallelModule
from fp8core.modules.multihead_attention import MultiheadAttention
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.sharded_weight import local_part


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
            state[part.key] = (
                rows if part.axis is None else _distributed(rows, Shard(part.axis), group)
            )
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


def _distributed(local: torch.Tensor, placement: Placement, group: Any) -> DTensor:
    mesh = DeviceMesh.from_group(group, local.device.type)
    return DTensor.from_local(local, mesh, [placement], run_check=False)


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


class _RemoteExpert(DTensor):
    """A parameter of an expert that another rank holds; without memory here."""

    _source: _OfAllRanks
    _number: int

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """Return the whole parameter; all ranks gather their experts together."""
        return self._source.take(self._number)

    def __deepcopy__(self, memo: Any) -> _RemoteExpert:
        return _stand_in(self, copy.deepcopy(self._source, memo), self._number)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.to_local().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]  # torch's

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # untyped
        return f"_RemoteExpert({self._number}, {list(self.shape)})"


class _OfAllRanks:
    """A parameter of the experts of all ranks; ``local`` are the tensors of this rank."""

    def __init__(self, local: Sequence[torch.Tensor], group: Communicator) -> None:
        self._local, self._group = local, group
        self._gathered: dict[int, torch.Tensor] = {}

    def __deepcopy__(self, memo: Any) -> _OfAllRanks:
        return _OfAllRanks(copy.deepcopy(self._local, memo), self._group)

    def take(self, number: int) -> DTensor:
        """Return the parameter of expert ``number``.

        All ranks gather those of all when the first of them is taken, or one for the second time.
        """
        if number not in self._gathered:
            first = self._group.rank * len(self._local)
            numbers = range(first, first + len(self._local))
            self._gathered = {
                at: parameter for at, parameter in enumerate(self._gather()) if at not in numbers
            }
        process_group: Any = self._group
        return _distributed(self._gathered.pop(number), Replicate(), process_group.group)

    def _gather(self) -> Iterator[torch.Tensor]:
        local: list[Any] = [
            tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
            for tensor in self._local
        ]
        if not hasattr(local[0], "__tensor_flatten__"):
            yield from self._of_all(local)
            return
        names, context = local[0].__tensor_flatten__()
        parts = [self._of_all([getattr(tensor, name) for tensor in local]) for name in names]
        for part in zip(*parts, strict=True):
            tensors = dict(zip(names, part, strict=True))
            yield local[0].__tensor_unflatten__(tensors, context, local[0].shape, local[0].stride())

    def _of_all(self, local: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        yield from self._group.gather(torch.stack(list(local)), "experts").wait()


def remote_experts(
    local: Sequence[torch.Tensor], group: Communicator
) -> Iterator[tuple[int, DTensor]]:
    """Yield the number of each expert of another rank, and a tensor in its stead; ``local`` are the
    tensors of this rank's experts."""
    if not local:
        return
    process_group: Any = group
    ranks = dist.get_process_group_ranks(process_group.group)
    source, like = _OfAllRanks(local, group), local[0]
    empty = torch.empty(0, dtype=like.dtype, device=like.device)
    for rank, of_rank in enumerate(ranks):
        if rank == group.rank:
            continue
        mesh = DeviceMesh(like.device.type, [of_rank], _init_backend=False)
        part: Any = DTensor.from_local(
            empty, mesh, [Replicate()], run_check=False, shape=like.shape, stride=like.stride()
        )
        for number in range(rank * len(local), (rank + 1) * len(local)):
            yield number, _stand_in(part, source, number)


def _stand_in(like: Any, source: _OfAllRanks, number: int) -> _RemoteExpert:
    kind: Any = _RemoteExpert  # whose constructor torch has not typed
    tensor: _RemoteExpert = kind(like.to_local(), like._spec, requires_grad=False)
    tensor._source, tensor._number = source, number
    return tensor


class SavedScales:
    """How the scales of ``num_local`` experts of this rank, in ``num_linears`` linears, are saved.

    Attributes:
        group: the ranks; None: this one alone.
    """

    def __init__(self, num_linears: int, num_local: int, group: Communicator | None) -> None:
        self.sizes = num_linears, num_local
        self.group = group

    def saved(self, scales: torch.Tensor) -> torch.Tensor:
        """Return ``scales [..., linears * experts * slots]`` as it is saved, in the same memory."""
        local = scales.detach().view(*scales.shape[:-1], *self.sizes, -1)
        if self.group is None:
            return local
        process_group: Any = self.group
        return _distributed(local, Shard(local.dim() - 2), process_group.group)

    def restored(self, saved: Any) -> Any:
        """Return this rank's part of ``saved``, a value of a checkpoint, as the layer holds it;
        another value than :meth:`saved` returns, as it is."""
        if not isinstance(saved, torch.Tensor) or saved.dim() < 3:
            return saved
        part, (num_linears, num_local) = local_part(saved), self.sizes
        if self.group is not None and part.shape[-2] == num_local * self.group.size:
            part = part.narrow(-2, num_local * self.group.rank, num_local)
        return part.flatten(-3) if part.shape[-3:-1] == (num_linears, num_local) else saved
