"""The tensors of a state_dict by the rules of a family: taken out, checked and parted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fp8core.conversion.huggingface.family import QKV, Rule, Shape, in_layer
from fp8core.errors import OperandError
from fp8core.modules.head_split import HeadSizes, join_query_key_value, separate_query_key_value
from fp8core.reporting import some


def their_shapes(rule: Rule, shapes: Mapping[str, Shape]) -> list[Shape]:
    """Return the shape of each of ``rule.theirs``."""
    ours = [shapes[in_layer(name)] for name in rule.ours]
    if len(rule.theirs) > 1:
        result: list[Shape] = [(rows, *ours[0][1:]) for rows in rule.sizes]
    elif len(rule.ours) > 1:
        result = [(sum(rule.sizes), *ours[0][1:])]
    else:
        result = ours
    return [shape[::-1] for shape in result] if rule.transposed else result


def check_shape(owner: str, name: str, value: object, shape: Shape) -> None:
    """Refuse a tensor of another shape than the config says."""
    if not isinstance(value, torch.Tensor):
        raise OperandError(f"{owner}: {name} is {type(value).__name__}; expected a torch.Tensor.")
    fits = len(shape) == value.dim() and all(
        expected in (None, size) for expected, size in zip(shape, value.shape, strict=True)
    )
    if not fits:
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        raise OperandError(f"{owner}: {name} is {list(value.shape)}; the config says [{sizes}].")


def full_name(name: str, prefix: str) -> str:
    """Return the name of a tensor in the state_dict of a model with a head."""
    return name if name == "lm_head.weight" else prefix + name


def popped(
    state: dict[str, torch.Tensor], names: Sequence[str], owner: str, prefix: str
) -> list[torch.Tensor]:
    """Remove ``names`` from ``state`` and return their tensors."""
    missing = [full_name(name, prefix) for name in names if name not in state]
    if missing:
        raise OperandError(f"{owner}: the state_dict lacks {some(missing)}.")
    return [state.pop(name) for name in names]


def parted(values: Sequence[torch.Tensor], rule: Rule) -> list[torch.Tensor]:
    """Return the rows of ``values`` in the parts of the other side of ``rule``."""
    if not rule.sizes:
        return list(values)
    if len(values) == len(rule.sizes):
        return [torch.cat(list(values))]
    (value,) = values
    return list(torch.split(value, list(rule.sizes)))


def check_empty(state: Mapping[str, torch.Tensor], owner: str) -> None:
    """Refuse tensors that no rule has taken."""
    if state:
        raise OperandError(
            f"{owner}: the state_dict has {some(list(state))}, which the config's model lacks."
        )


def fuse(state: dict[str, torch.Tensor], sizes: HeadSizes) -> None:
    """Put one weight in the place of each query, key and value; biases likewise."""
    for name in [name for name in state if f"{QKV}.query_" in name]:
        parts = [
            state.pop(name.replace(".query_", f".{role}_")) for role in ("query", "key", "value")
        ]
        state[name.replace(".query_", ".")] = join_query_key_value(parts, sizes)


def split(state: dict[str, torch.Tensor], sizes: HeadSizes, shapes: Mapping[str, Shape]) -> None:
    """Put query, key and value in the place of each fused weight; biases likewise."""
    for name in [name for name in state if name.endswith((f"{QKV}.weight", f"{QKV}.bias"))]:
        prefix, _, kind = name.rpartition(".")
        both = [name, *(n for n in state if n.startswith(prefix) and n.endswith(f"_{kind}"))]
        both = [n for n in both if "layer_norm" not in n]
        if len(both) > 1:
            raise OperandError(
                f"to_hugging_face: the state_dict has {some(both)}; expected a fused projection or "
                f"its parts."
            )
        _, *columns = shapes[f"{QKV}.query_{kind}"]
        rows = sizes.query_size + 2 * sizes.key_size
        check_shape("to_hugging_face", name, state[name], (rows, *columns))
        parts = separate_query_key_value(state.pop(name), sizes)
        for role, part in zip(("query", "key", "value"), parts, strict=True):
            state[f"{prefix}.{role}_{kind}"] = part
