"""The writer of ``_extra_state``: the opcodes of a pickle that Transformer Engine reads.

The pickle has only opcodes of protocol 4 and the classes of Transformer Engine's own states, so
that a reader with an allow-list accepts it too.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

import torch

from fp8core.modules.state.reading import MAGIC, PROTOCOL, RECIPES
from fp8core.recipe import DelayedScaling
from fp8core.recipe.base import Format

_FIELDS = (
    *("margin", "fp8_format", "amax_history_len", "amax_compute_algo"),
    *("scaling_factor_compute_algo", "reduce_amax", "fp8_dpa", "fp8_mha", "backward_override"),
)


def fields_of(recipe: DelayedScaling) -> dict[str, Any]:
    """Return the fields of ``recipe`` that Transformer Engine's DelayedScaling has too."""
    return {name: getattr(recipe, name) for name in _FIELDS}


EXPERT = "fp8core_expert"
"""The key of an expert's delayed state; Transformer Engine and Megatron ignore the key."""


def write_extra_state(
    buffers: Mapping[str, torch.Tensor],
    fields: Mapping[str, Any],
    expert: Mapping[str, torch.Tensor] | None = None,
) -> bytes:
    """Return the pickle of a module's delayed state.

    Args:
        buffers: ``scale_fwd [3 g]``, ``amax_history_fwd [len, 3 g]``, ``scale_bwd [2 g]`` and
            ``amax_history_bwd [len, 2 g]``, float32, for g GEMMs.
        fields: the fields of Transformer Engine's DelayedScaling; ``fp8_format`` is a
            :class:`fp8core.recipe.Format`, all other fields are plain values.
        expert: tensors by name, to be stored under :data:`EXPERT`.
    """
    pair: Format = fields["fp8_format"]
    maxima = int(pair.max_fwd), int(pair.max_bwd)
    member = _call(_class("Format"), (_new(_class("_FormatHelper"), maxima),))
    content = {
        "recipe": _new(_class("DelayedScaling"), ())
        + _opcodes({**fields, "fp8_format": member})
        + b"b",
        **{name: _tensor(value) for name, value in buffers.items()},
        "extra_fp8_variables": {
            "fp8_checkpoint": True,
            "num_gemms": buffers["scale_fwd"].numel() // 3,
            "fp8_max_fwd": maxima[0],
            "fp8_max_bwd": maxima[1],
        },
    }
    if expert is not None:
        content[EXPERT] = {name: _tensor(value) for name, value in expert.items()}
    return b"\x80\x04" + _opcodes(content) + b"."


def _opcodes(value: Any) -> bytes:
    """Return the opcodes of None, a truth value, a number, a text, or a tuple or dict of values;
    bytes are opcodes themselves."""
    match value:
        case bytes():
            return value
        case None:
            return b"N"
        case bool():
            return b"\x88" if value else b"\x89"
        case int() if -(2**31) <= value < 2**31:
            return b"J" + struct.pack("<i", value)
        case int():
            size = value.bit_length() // 8 + 1
            return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)
        case float():
            return b"G" + struct.pack(">d", value)
        case tuple():
            return (b"(" + b"".join(map(_opcodes, value)) + b"t") if value else b")"
        case Mapping():
            items = (_opcodes(name) + _opcodes(item) for name, item in value.items())
            return b"}(" + b"".join(items) + b"u"
    assert isinstance(value, str)
    encoded = value.encode()
    return b"X" + struct.pack("<I", len(encoded)) + encoded


def _class(name: str, module: str = RECIPES) -> bytes:
    return b"c" + f"{module}\n{name}\n".encode()


def _call(function: bytes, arguments: tuple[Any, ...]) -> bytes:
    return function + _opcodes(arguments) + b"R"


def _new(kind: bytes, arguments: tuple[Any, ...]) -> bytes:
    return kind + _opcodes(arguments) + b"\x81"


def _tensor(value: torch.Tensor) -> bytes:
    """Return the opcodes of a float32 tensor, as torch pickles a tensor."""
    whole = value.detach().to("cpu", torch.float32).contiguous()
    file = _storage_file(whole)
    content = b"B" + struct.pack("<I", len(file)) + file
    storage = _call(_class("_load_from_bytes", "torch.storage"), (content,))
    no_hooks = _call(_class("OrderedDict", "collections"), ())
    arguments = (storage, 0, tuple(whole.shape), whole.stride(), False, no_hooks)
    return _call(_class("_rebuild_tensor_v2", "torch._utils"), arguments)


def _storage_file(value: torch.Tensor) -> bytes:
    """Return the file of a float32 storage in the format of torch.save before zip files."""
    count = value.numel()
    sizes = {"short": 2, "int": 4, "long": 4}
    system = {"protocol_version": PROTOCOL, "little_endian": True, "type_sizes": sizes}
    identity = ("storage", _class("FloatStorage", "torch"), "0", "cpu", count, None)
    key = b"](" + _opcodes("0") + b"e"
    contents = MAGIC, PROTOCOL, system, _opcodes(identity) + b"Q", key
    pickles = b"".join(b"\x80\x02" + _opcodes(content) + b"." for content in contents)
    return pickles + struct.pack("<q", count) + value.numpy().tobytes()
