"""A layer's delayed scaling from Transformer Engine's ``_extra_state``.

The state is a pickle as uint8 ``[bytes]``, in version 1 an ``io.BytesIO`` by torch.save, and holds

=============  ==============================================================================
module         ``recipe`` (from 2.0 on), ``scale_fwd [3 g]``, ``amax_history_fwd [len, 3 g]``,
               ``scale_bwd [2 g]``, ``amax_history_bwd [len, 2 g]``, ``extra_fp8_variables``,
               for g GEMMs; up to 1.x ``scale_inv_fwd`` and ``scale_inv_bwd`` too
attention      the same with 3 GEMMs, whose slots are below
operation      ``forward`` and ``backward``, dicts with the keys of the way, of 2 tensors
               (input, weight) and 1 (grad_output)
=============  ==============================================================================

The slots of a GEMM are input, weight, output and grad_output, grad_input, as they are in fp8core;
an empty tensor stands for no state. Source: Transformer Engine 2.20.2, pytorch/module/base.py and
pytorch/ops/op.py, get_extra_state. Those of attention:

=======================  ============================  =========================================
Transformer Engine       slot of                       fp8core
=======================  ============================  =========================================
forward ``2``, QKV       output of the first GEMM      ``q``, ``k``, ``v``, one slot each
forward ``3``, O         input of the second           none: the result has the scale of ``v``
forward ``8``, S         output of the third           ``s``
backward ``0``, dQKV     gradient of the first output  none: these gradients are not quantized
backward ``3``, dO       of the second input           ``grad_output``
backward ``5``, dP       of the third input            ``dp``
=======================  ============================  =========================================

Source: the same, pytorch/cpp_extensions/fused_attn.py, ``META_QKV`` to ``META_DP``;
pytorch/constants.py numbers the slots.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from fp8core.errors import OperandError
from fp8core.modules.state.reading import RECIPE_CLASSES, RECIPES, Record, read_values
from fp8core.modules.state.writing import EXPERT
from fp8core.recipe.base import Format
from fp8core.recipe.plan import AttentionPlan, LinearPlan, Plan
from fp8core.reporting import log_once
from fp8core.tensors.checks import kind_fault, lacks_memory
from fp8core.tensors.delayed_state import BUFFERS, META, meta_text

_FORWARD = {"q": 2, "k": 2, "v": 2, "s": 8}
_BACKWARD = {"grad_output": 3, "dp": 5}
_QKV, _RESULT = 2, 3
_THREE_GEMMS = {"fwd": (_FORWARD, AttentionPlan.slots.forward, 9)}
_THREE_GEMMS["bwd"] = (_BACKWARD, AttentionPlan.slots.backward, 6)


def from_three_gemms(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return attention's buffers, without the metadata, from those of three GEMMs.

    Queries, keys and values take the scale that they have in common.

    Raises:
        OperandError: another number of slots.
    """
    buffers = {}
    for way, (places, names, count) in _THREE_GEMMS.items():
        for name, tensor, buffer in _fresh(way, tensors, len(names)):
            if tensor.shape[-1] != count:
                raise OperandError(
                    f"its {name} is {list(tensor.shape)}, expected {count} slots of attention"
                )
            for slot, at in places.items():
                buffer[..., names.index(slot)] = tensor[..., at]
            buffers[name] = buffer
    return buffers


def to_three_gemms(buffers: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of three GEMMs from attention's buffers.

    The common scale of queries, keys and values is the smallest, that of the largest amax; the
    result takes that of the values. Gradients of queries, keys and values start fresh.
    """
    tensors = {}
    for way, (places, names, count) in _THREE_GEMMS.items():
        for name, source, whole in _fresh(way, buffers, count):
            for slot, at in places.items():
                whole[..., at] = source[..., names.index(slot)]
            if way == "fwd":
                three = source[..., [names.index(slot) for slot in "qkv"]]
                is_scale = name.startswith("scale")
                whole[..., _QKV] = three.amin(-1) if is_scale else three.amax(-1)
                whole[..., _RESULT] = source[..., names.index("v")]
            tensors[name] = whole
    return tensors


def _fresh(
    way: str, tensors: Mapping[str, torch.Tensor], count: int
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield the name of the scale and of the history of ``way``, the tensor of that name, and a
    fresh one like it of ``count`` slots."""
    for name, fill in ((f"scale_{way}", 1.0), (f"amax_history_{way}", 0.0)):
        tensor = tensors[name]
        yield name, tensor, tensor.new_full((*tensor.shape[:-1], count), fill)


_T = TypeVar("_T")
_ZIP, _PICKLE = b"PK", b"\x80"
_WAYS = {"forward": "fwd", "backward": "bwd"}
# Of one GEMM: the slots, and which of them an operation of Transformer Engine writes.
_SLOTS = {"fwd": (3, (0, 1)), "bwd": (2, (0,))}


def may_be_transformer_engine_s(value: Any) -> bool:
    """Say whether ``value`` of a checkpoint may be a state of Transformer Engine, perhaps a damaged
    one: bytes, or a tensor. Other libraries have dicts and objects of their own there."""
    return isinstance(value, torch.Tensor | io.BytesIO | bytes | bytearray)


def read_extra_state(value: Any, plan_type: type[Plan] = LinearPlan) -> dict[str, torch.Tensor]:
    """Return the buffers of delayed scaling that ``value``, an ``_extra_state``, holds.

    ``plan_type`` is that of the layer, LinearPlan or AttentionPlan. The buffers are float32 tensors
    on the CPU under fp8core's names, and ``delayed_meta``; there are none for a recipe without
    state. An infinite amax in a history, at which Transformer Engine freezes a scale, is left out
    and logged once.

    Raises:
        OperandError: it is damaged, or holds a class that no such state needs; nothing of the file
            was called.
    """
    return _refusing(lambda: _READERS[plan_type](_content(value)))


def read_expert_state(value: Any) -> tuple[dict[str, torch.Tensor], bool]:
    """Return the buffers of an expert of a grouped linear, and whether they hold the slots of this
    expert; otherwise they hold the slots that Megatron's split of the layer's state puts there.

    Raises:
        OperandError: as :func:`read_extra_state`.
    """

    def read() -> tuple[dict[str, torch.Tensor], bool]:
        content = _content(value)
        return _buffers(content), type(content.get(EXPERT)) is dict

    return _refusing(read)


def _refusing(read: Callable[[], _T]) -> _T:
    """Return the result of ``read``; the remedy is added to its error."""
    try:
        return read()
    except OperandError as error:
        raise OperandError(
            f"the checkpoint's _extra_state is refused: {error}. Leave it out of the state_dict "
            f"to load the weights alone; delayed scaling then starts fresh"
        ) from None


def _content(value: Any) -> dict[Any, Any]:
    """Return the entries of an extra state, none of an empty one."""
    data = _bytes_of(value)
    if not data.startswith((_PICKLE, _ZIP)):
        raise OperandError(
            f"it begins with the bytes {data[:4]!r}, and a state of Transformer Engine is a pickle "
            f"or a zip file by torch.save"
        )
    content = read_values(data)
    if content is not None and type(content) is not dict:
        raise OperandError(f"it holds a {type(content).__name__}, not a dict of tensors")
    return content or {}


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, io.BytesIO):
        if value.closed:
            raise OperandError("it is a file in memory that is closed")
        return value.getvalue()
    if isinstance(value, bytes | bytearray):
        return bytes(value)
    if type(value) not in (torch.Tensor, torch.nn.Parameter):
        raise OperandError(f"it is a {type(value).__name__}, expected a tensor uint8 [bytes]")
    fault = kind_fault(value)
    if fault is not None:
        raise OperandError(f"it {fault}")
    if value.dtype != torch.uint8 or value.is_meta or value.dim() != 1:
        raise OperandError(
            f"it is {value.dtype} {list(value.shape)} on {value.device.type}, expected torch.uint8 "
            f"[bytes] with values"
        )
    if lacks_memory(value):
        raise OperandError("it has no memory for its elements")
    return value.detach().cpu().contiguous().resolve_neg().numpy().tobytes()  # type: ignore[no-any-return]


def _buffers(content: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    if set(content) <= set(_WAYS):
        return _operation_buffers(content)
    if not _is_delayed(content):
        return {}
    of_experts = content.get(EXPERT)
    entries = {**content, **of_experts} if type(of_experts) is dict else content
    tensors = {name: _tensor(entries, name) for name in BUFFERS if name != META}
    return {**tensors, META: _meta(content, tensors)}


def _attention_buffers(content: Mapping[Any, Any]) -> dict[str, torch.Tensor]:
    """Return the buffers of attention; none where it computes in high precision, or where the
    state is that of a recipe without delayed scaling of queries, keys and values."""
    recipe, extra = content.get("recipe"), content.get("extra_fp8_variables")
    if recipe is None or not _is_delayed(content):
        return {}
    flags = [recipe.fields.get(name) for name in ("fp8_dpa", "fp8_mha")]
    if any(isinstance(flag, torch.Tensor) for flag in flags):
        raise OperandError("its recipe's fp8_dpa or fp8_mha is a tensor")
    if not any(flags):
        return {}
    recipes = extra.get("local_recipes", []) if type(extra) is dict else []
    if type(recipes) not in (list, tuple):
        raise OperandError(f"its local_recipes are a {type(recipes).__name__}")
    if any(
        type(record) is not Record or record.kind.name != "DelayedScaling" for record in recipes
    ):
        return {}
    tensors = {name: _tensor(content, name) for name in BUFFERS if name != META}
    pair = _format_of(recipe)
    used = dict.fromkeys("qkvs", pair.forward.name)
    used |= dict.fromkeys(("grad_output", "dp"), pair.backward.name)
    length = tensors["amax_history_fwd"].shape[0]
    return {**from_three_gemms(tensors), META: _encoded(AttentionPlan, used, length)}


_READERS = {LinearPlan: _buffers, AttentionPlan: _attention_buffers}
READABLE = frozenset(_READERS)
"""The kinds of plan whose state is read."""


def _operation_buffers(content: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the buffers of an operation, whose unused slots of results are added."""
    tensors: dict[str, torch.Tensor] = {}
    first: Mapping[str, Any] | None = None
    for mode, way in _WAYS.items():
        part = content.get(mode)
        if part is None:
            continue
        if type(part) is not dict:
            raise OperandError(f"its {mode} is a {type(part).__name__}, not a dict of tensors")
        if not _is_delayed(part):
            return {}
        first = first or part
        count, used = _SLOTS[way]
        saved = {name: _tensor(part, name) for name in (f"scale_{way}", f"amax_history_{way}")}
        for name, values, whole in _fresh(way, saved, count):
            if values.shape[-1:] != (len(used),):
                raise OperandError(
                    f"its {name} is {list(values.shape)}, expected {len(used)} slots"
                )
            whole[..., list(used)] = values
            tensors[name] = whole
    if first is None:
        return {}
    missing = [name for name in BUFFERS if name != META and name not in tensors]
    if missing:
        raise OperandError(f"it lacks {', '.join(missing)}")
    return {**tensors, META: _meta(first, tensors)}


def _is_delayed(content: Mapping[str, Any]) -> bool:
    """Say whether ``content`` is of delayed scaling, the only recipe before 2.0."""
    recipe = content.get("recipe")
    if recipe is None:
        return any(name in content for name in BUFFERS)
    if type(recipe) is not Record or recipe.kind.module != RECIPES:
        raise OperandError(f"its recipe is a {type(recipe).__name__}")
    if recipe.kind.name not in RECIPE_CLASSES:
        raise OperandError(f"its recipe is a {recipe.kind.name}")
    return recipe.kind.name == "DelayedScaling"


def _tensor(content: Mapping[str, Any], name: str) -> torch.Tensor:
    value = content.get(name)
    if not isinstance(value, torch.Tensor):
        raise OperandError(f"it lacks {name}")
    if value.dtype != torch.float32 or value.dim() != (2 if "history" in name else 1):
        raise OperandError(f"its {name} is {value.dtype} {list(value.shape)}")
    if "history" in name and bool(value.isinf().any()):
        log_once(
            "a delayed state of Transformer Engine has infinite amaxes in its history, at which "
            "its scales stay frozen; they are left out here"
        )
        value = value.masked_fill(value.isinf(), 0.0)
    return value


def _meta(content: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return ``delayed_meta``: the formats of the slots, and the history's length."""
    recipe = content.get("recipe")
    pair = _format_of(recipe) if recipe is not None else _format_of_maxima(content)
    used = dict.fromkeys(("input", "weight"), pair.forward.name)
    used["grad_output"] = pair.backward.name
    return _encoded(LinearPlan, used, tensors["amax_history_fwd"].shape[0])


def _encoded(plan_type: type[Plan], used: Mapping[str, str], history_len: int) -> torch.Tensor:
    """Return the formats of the slots of a plan, of which those of ``used`` have one."""
    slots = plan_type.slots
    names = [used.get(name) for name in (*slots.forward, *slots.backward)]
    text = meta_text(names, history_len)
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device="cpu")


def _format_of(recipe: Record) -> Format:
    """Return the format of a DelayedScaling record; its default where it is not written."""
    member = recipe.fields.get("fp8_format")
    if member is None:
        return Format.HYBRID
    if type(member) is not Record or member.kind.name != "Format" or len(member.args) != 1:
        raise OperandError("its recipe's fp8_format is no Format")
    (value,) = member.args
    if type(value) is Record and value.kind.name == "_FormatHelper":
        maxima = (*value.args, value.fields.get("max_fwd"), value.fields.get("max_bwd"))
        return format_named(maxima[0], maxima[1])
    for candidate in _FORMATS:
        if value == candidate.name:
            return candidate
    raise OperandError("its recipe's fp8_format is no Format of 8 bits")


def _format_of_maxima(content: Mapping[str, Any]) -> Format:
    extra = content.get("extra_fp8_variables")
    if type(extra) is not dict:
        return Format.HYBRID
    return format_named(extra.get("fp8_max_fwd", 448), extra.get("fp8_max_bwd", 57344))


_FORMATS = (Format("hybrid"), Format("e4m3"), Format("e5m2"))


def format_named(max_fwd: Any, max_bwd: Any) -> Format:
    """Return the format whose largest values forward and backward are these.

    Raises:
        OperandError: there is none.
    """
    if type(max_fwd) in (int, float) and type(max_bwd) in (int, float):
        for member in _FORMATS:
            if (max_fwd, max_bwd) == (member.forward.max, member.backward.max):
                return member
    raise OperandError("its recipe's fp8_format is none of E4M3, E5M2 and HYBRID")
