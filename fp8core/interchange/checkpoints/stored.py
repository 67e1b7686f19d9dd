"""Quantized weights of a file: their tensors, how they are quantized, and their values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8core import formats
from fp8core.backend_api import Operand, OperandSpec
from fp8core.errors import OperandError, UnsupportedError
from fp8core.interchange.checkpoints.files import Header
from fp8core.interchange.checkpoints.layouts import CODES, METHODS, grid
from fp8core.recipe import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
)
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.storage import decode_operand

_SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")


@dataclass(frozen=True, slots=True)
class Method:
    """How a config says that weights are quantized.

    ``block`` is None where the shape of the scales tells a scale for the tensor from one for each
    row. ``is_fp4``: two codes of e2m1 in a byte, under two levels of scales. ``element``: the
    format of codes of a byte, None where the config leaves it to the files. ``weights_alone``: it
    says that activations stay in high precision, None where it says that of some layers.
    """

    name: str
    block: tuple[int, int] | None
    is_fp4: bool = False
    element: str | None = None
    weights_alone: bool | None = False


def method_of(config: Mapping[str, Any]) -> Method | None:
    """Return the quantization method of a ``config.json``; None: nothing is quantized.

    Raises:
        UnsupportedError: a quantization method that is not read.
        OperandError: the config contradicts itself.
    """
    section = config.get("quantization_config", config.get("compression_config"))
    if section is None:
        return None
    if not isinstance(section, dict):
        raise OperandError(f"the quantization_config is a {type(section).__name__}.")
    name = section.get("quant_method")
    if name == "fp8":
        element = section.get("fmt")
        if element not in (None, "e4m3", "e5m2"):
            raise UnsupportedError(f"the quantization_config has fmt={element!r}.")
        return Method("fp8", _block(section.get("weight_block_size")), element=element)
    if name == "compressed-tensors":
        return _compressed_method(section)
    raise UnsupportedError(
        f"the quantization_config has quant_method={name!r}, which is not read; "
        f"{' and '.join(METHODS)} are."
    )


def _block(sizes: Any) -> tuple[int, int] | None:
    if sizes is None:
        return None
    is_pair = isinstance(sizes, list | tuple) and len(sizes) == 2
    if not is_pair or not all(type(size) is int and 0 < size < 2**31 for size in sizes):
        raise OperandError(
            f"the quantization_config has blocks of {sizes!r}, expected two positive sizes."
        )
    return sizes[0], sizes[1]


def _compressed_method(config: Mapping[str, Any]) -> Method:
    """Return the one scheme of all groups of a compressed-tensors config."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise OperandError("the quantization_config has no config_groups.")
    entries = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
    schemes = [weights for weights in entries if isinstance(weights, dict)]
    if len(schemes) != len(groups):
        raise UnsupportedError("the quantization_config has a group without weights.")
    methods = {_scheme(weights) for weights in schemes}
    alone = {group.get("input_activations", group) is None for group in groups.values()}
    weights_alone = alone.pop() if len(alone) == 1 else None
    if len(methods) != 1:
        raise UnsupportedError(
            "the quantization_config has groups with different schemes; files of one are read."
        )
    return dataclasses.replace(methods.pop(), weights_alone=weights_alone)


def _scheme(weights: Mapping[str, Any]) -> Method:
    kind = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
    if not weights.get("symmetric", True):
        raise UnsupportedError("the quantization_config has weights with zero points.")
    group = weights.get("group_size")
    if kind == ("float", 8, "block"):
        return _float8(_block(weights.get("block_structure")))
    if kind in (("float", 8, "tensor"), ("float", 8, "channel")):
        return _float8((0, 0) if kind[2] == "tensor" else (1, 0))
    if kind == ("float", 8, "group") and type(group) is int:
        return _float8(_block([1, group]))
    if kind == ("float", 4, "tensor_group") and group == 16:
        return Method("compressed-tensors", (1, 16), is_fp4=True)
    raise UnsupportedError(
        f"the quantization_config has weights of type {kind[0]!r}, {kind[1]!r} bits, strategy "
        f"{kind[2]!r}, group_size {group!r}. Read are 8 bits of float by tensor, channel, block "
        f"and group, and 4 bits of float by tensor_group of 16."
    )


def _float8(block: tuple[int, int] | None) -> Method:
    """Return compressed-tensors' 8 bits of float, which are e4m3 there."""
    return Method("compressed-tensors", block, element="e4m3")


class StoredWeight:
    """The codes' header and the scales of one weight, checked.

    Args:
        name: of the weight.
        shape: of the parameter, ``[..., n, k]``.
        header: of the codes.
        scale: as the file has it.
        outer: NVFP4's scale of the tensor, by which is divided.
        method: what the config says.

    Raises:
        OperandError: sizes or scales do not fit the parameter and the config.
        UnsupportedError: codes or scales of a kind that is not read.
    """

    def __init__(
        self,
        name: str,
        shape: Sequence[int],
        header: Header,
        scale: torch.Tensor,
        outer: torch.Tensor | None,
        method: Method,
    ) -> None:
        self.name = name
        self.shape = tuple(shape)
        self.method = method
        if len(self.shape) < 2:
            raise OperandError(f"{name!r} is {list(shape)} here, and codes in the checkpoint.")
        if method.is_fp4 != (outer is not None):
            packing = "two codes a byte" if method.is_fp4 else "one code a byte"
            raise OperandError(
                f"{name!r}: the quantization_config says {packing}, the file differs."
            )
        self.element = "e2m1" if method.is_fp4 else CODES[header.dtype]
        if method.element not in (None, self.element):
            raise OperandError(
                f"{name!r} holds {self.element} in the checkpoint; the quantization_config says "
                f"{method.element}."
            )
        stored = (*self.shape[:-1], self.shape[-1] // 2) if method.is_fp4 else self.shape
        if method.is_fp4 and (header.dtype != "U8" or self.shape[-1] % 2):
            raise OperandError(f"{name!r} is {header.dtype} in the checkpoint, expected U8.")
        if header.shape != stored:
            raise OperandError(
                f"{name!r} is {list(header.shape)} in the checkpoint, expected {list(stored)}."
            )
        self.outer = None if outer is None else self._outer(outer)
        self.block = method.block or self._block_of(scale)
        self.scale = self._scale(scale)

    @classmethod
    def of_pieces(
        cls, name: str, shape: tuple[int, ...], pieces: Sequence[StoredWeight | None]
    ) -> StoredWeight | str:
        """Return the weight ``[experts, n, k]`` of ``pieces``, rows of its matrices in order, or a
        text that says why they cannot be one weight."""
        weights = [piece for piece in pieces if piece is not None]
        kinds = {
            (weight.method, weight.element, weight.block, weight.outer is None)
            for weight in weights
        }
        if len(weights) != len(pieces) or len(kinds) != 1:
            return "its experts are stored in different ways"
        block, per_expert = weights[0].block, len(pieces) // shape[0]
        is_cut = not block[0] or weights[0].shape[0] % block[0]
        if weights[0].outer is not None or (per_expert > 1 and is_cut):
            return "parts of its matrices have scales of their own"
        whole = cls.__new__(cls)
        whole.name, whole.shape, whole.method = name, shape, weights[0].method
        whole.element, whole.block, whole.outer = weights[0].element, block, None
        rows = torch.cat([weight.scale[0] for weight in weights])
        whole.scale = rows.reshape(shape[0], -1, rows.shape[-1])
        return whole

    @property
    def is_power_of_two(self) -> bool:
        """Whether all scales are powers of two that e8m0 has, whose least is 2^-127."""
        mantissa, exponent = torch.frexp(self.scale)
        return bool(((mantissa == 0.5) & (exponent >= -126)).all())

    def _outer(self, outer: torch.Tensor) -> torch.Tensor:
        if not outer.is_floating_point():
            raise OperandError(f"{self.name!r} has a global scale in {outer.dtype}.")
        value = outer.to(torch.float32).reshape(-1)
        if value.numel() != 1 or not bool((value.isfinite() & (value > 0)).all()):
            raise OperandError(
                f"{self.name!r} has the global scale {outer.flatten()[:3].tolist()}."
            )
        return torch.ones_like(value) / value

    def _block_of(self, scale: torch.Tensor) -> tuple[int, int]:
        """Return the block of scales whose config names none: the tensor, or each row."""
        matrices = math.prod(self.shape[:-2])
        return (0, 0) if scale.numel() == matrices else (1, 0)

    def _scale(self, scale: torch.Tensor) -> torch.Tensor:
        """Return the scales as float32 ``[matrices, rows of blocks, columns of blocks]``."""
        counts = grid(self.shape[-2:], self.block)  # type: ignore[arg-type]  # two sizes
        leading = self.shape[:-2]
        expected = (*leading, *counts)
        # A scale of a matrix, or of each row, may be stored with fewer dimensions.
        allowed = [expected]
        if self.block[1] == 0:
            allowed += [(*leading, counts[0])]
        if self.block == (0, 0):
            allowed += [leading, (*leading, 1)]
        if tuple(scale.shape) not in allowed:
            raise OperandError(self._misfit(scale, expected))
        values = _as_float32(self.name, scale, is_fp4=self.method.is_fp4)
        if not bool((values.isfinite() & (values >= 0)).all()):
            raise OperandError(f"{self.name!r} has scales that are NaN, infinite or negative.")
        return values.reshape(-1, *counts)

    def _misfit(self, scale: torch.Tensor, expected: tuple[int, ...]) -> str:
        text = (
            f"{self.name!r} {list(self.shape)} has scales {list(scale.shape)}; the "
            f"quantization_config's blocks of {list(self.block)} need {list(expected)}."
        )
        if scale.dim() >= 2 and min(scale.shape[-2:]) > 0:
            sizes = [-(-n // c) for n, c in zip(self.shape[-2:], scale.shape[-2:], strict=True)]
            text += f" They would fit blocks of {sizes}."
        return text

    def values(self, codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the values of ``codes`` in ``dtype``, rounded once from float32."""
        width = dtype if dtype in (torch.float32, torch.bfloat16, torch.float16) else torch.float32
        data = codes.view(torch.uint8).reshape(-1, self.shape[-2], codes.shape[-1])
        matrices = [
            self._matrix(matrix, scale, width)
            for matrix, scale in zip(data, self.scale, strict=True)
        ]
        whole = matrices[0] if len(self.shape) == 2 else torch.stack(matrices)
        return whole.reshape(self.shape).to(dtype)

    def _matrix(self, data: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        if self.outer is None:
            spec = OperandSpec(self.element, self.block, formats.by_name(self.element).max)
            return decode_operand(Operand(data, scale), spec, dtype)
        spec = OperandSpec(self.element, self.block, 6.0, "e4m3")
        rest = -data.shape[1] % (self.block[1] // 2)
        padded = torch.nn.functional.pad(data, (0, rest))
        operand = Operand(padded, self._e4m3(scale), self.outer.reshape(1, 1))
        return decode_operand(operand, spec, dtype)[:, : self.shape[-1]]

    @staticmethod
    def _e4m3(scale: torch.Tensor) -> torch.Tensor:
        return scale.to(torch.float8_e4m3fn).view(torch.uint8)  # exact: they were read from e4m3

    def recipe(self) -> Recipe | None:
        """Return the recipe whose forward multiplies these codes, None if there is none.

        Backward multiplies the dequantized weight where the blocks are not square, as its codes
        would be another rounding.
        """
        if self.element == "e2m1":
            return NVFP4BlockScaling(disable_2d_quantization=True, backward_override="dequantized")
        if self.element != "e4m3":
            return None
        if self.block == (0, 0):
            return Float8CurrentScaling()
        if self.block == (1, 0):
            return Float8RowwiseScaling(backward_override="dequantized")
        if self.block == (1, 32) and self.is_power_of_two:
            return MXFP8BlockScaling(backward_override="dequantized")
        is_float32 = not self.is_power_of_two
        if self.block == (128, 128):
            return Float8BlockScaling(use_f32_scales=is_float32)
        if self.block == (1, 128):
            return Float8BlockScaling(
                use_f32_scales=is_float32,
                w_block_scaling_dim=1,
                backward_override="dequantized",
            )
        return None

    def quantized(self, codes: torch.Tensor, recipe: Recipe, dtype: torch.dtype) -> QuantizedTensor:
        """Return the tensor that holds ``codes`` and the scales for ``recipe``."""
        scale = self.scale
        outer = None if self.outer is None else self.outer.reshape(1, 1)
        if self.outer is not None:
            scale = self._e4m3(scale)
        elif self.block == (1, 32):
            _, exponent = torch.frexp(scale)
            scale = (exponent + 126).to(torch.uint8)  # 2^(e - 127) as e8m0 stores it
        return QuantizedTensor.from_codes(
            codes.view(torch.uint8),
            scale.reshape(-1, scale.shape[-1]),
            recipe,
            global_scale_inv=outer,
            tensor="weight",
            dtype=dtype,
        )

    def native_fault(self, dtype: torch.dtype) -> str | None:
        """Say why a QuantizedTensor of ``dtype`` cannot hold the codes, None if it can."""
        if self.recipe() is None:
            return f"no recipe multiplies {self.element} in blocks of {list(self.block)}"
        if dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return f"the parameter is {dtype}"
        if self.outer is None and not bool((self.scale > 0).all()):
            return "it has scales of zero"
        step = 1 if self.block in ((0, 0), (1, 0)) else self.block[1]
        is_byte = self.outer is not None or self.block == (1, 32)
        if is_byte and self.shape[-1] % step:
            return f"blocks of {step} do not divide its {self.shape[-1]} columns"
        is_divided = not self.block[0] or self.shape[-2] % self.block[0] == 0
        if len(self.shape) > 2 and (not self.block[0] or not is_divided or self.outer is not None):
            return "its matrices have scales of their own"
        return None


def _as_float32(name: str, scale: torch.Tensor, *, is_fp4: bool) -> torch.Tensor:
    """Return scales as float32, exactly; bytes are exponents of e8m0, or e4m3 in NVFP4."""
    if is_fp4:
        if scale.dtype not in (torch.float8_e4m3fn, torch.uint8):
            raise OperandError(f"{name!r} has scales in {scale.dtype}, expected float8_e4m3fn.")
        return scale.view(torch.float8_e4m3fn).to(torch.float32)
    if scale.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return formats.by_name("e8m0").decode(scale.view(torch.uint8))
    if scale.dtype in (torch.float32, torch.bfloat16, torch.float16):
        return scale.to(torch.float32)
    raise UnsupportedError(
        f"{name!r} has scales in {scale.dtype}; read are {', '.join(_SCALES)} of safetensors."
    )
