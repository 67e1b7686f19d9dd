"""Quantizers to 8 bits: one scale a tensor, blocks of 128, and the blocks of microscaling."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
import torch.distributed

from fp8core import formats
from fp8core.backend_api import AmaxDesc, OperandSpec, QuantizeDesc
from fp8core.dispatch import table
from fp8core.errors import OperandError, RecipeError
from fp8core.functional.quantizers.base import Quantizer
from fp8core.functional.quantizers.dtype import format_of
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Slot
from fp8core.tensors.reduced_amax import ReduceAmax
from fp8core.tensors.storage import matrix_shape


def _spec(name: str, block: tuple[int, int], **fields: object) -> OperandSpec:
    return OperandSpec(name, block, formats.by_name(name).max, **fields)  # type: ignore[arg-type]  # fields by name


def _check_bits(owner: str, name: str, bits: int) -> str:
    if formats.by_name(name).bits != bits:
        raise RecipeError(f"{owner}({name!r}): expected a format of {bits} bits.")
    return name


def _maximum_over(group: torch.distributed.ProcessGroup | None) -> ReduceAmax:
    """Return what takes the maximum of amaxes over ``group``, all processes if None.

    Raises:
        OperandError: when it is called, torch.distributed is not initialized.
    """

    def reduce_amax(amaxes: torch.Tensor) -> torch.Tensor:
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            raise OperandError(
                "with_amax_reduction=True needs torch.distributed.init_process_group first."
            )
        reduced = amaxes.contiguous()
        torch.distributed.all_reduce(reduced, op=torch.distributed.ReduceOp.MAX, group=group)
        return reduced

    return reduce_amax


class Float8Quantizer(Quantizer):
    """One scale a tensor, which is given: that of delayed scaling, or a constant one.

    Args:
        scale: float32, one entry; elements are multiplied by it. Read in each cast.
        amax: float32, one entry, on the device of ``scale``; becomes the largest magnitude of it
            and of each tensor that is cast.
        fp8_dtype: the element format, as ``DType.kFloat8E4M3``.
        rowwise, columnwise: which orientations are made.

    Raises:
        OperandError: ``scale`` or ``amax`` is something else.
    """

    def __init__(
        self,
        scale: torch.Tensor,
        amax: torch.Tensor,
        fp8_dtype: object,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        self._format = _check_bits("Float8Quantizer", format_of(fp8_dtype, "Float8Quantizer"), 8)
        self.dtype = fp8_dtype
        for name, one in (("scale", scale), ("amax", amax)):
            _check_entry(name, one)
        if scale.device != amax.device:
            raise OperandError(
                f"Float8Quantizer: scale is on {scale.device}, amax on {amax.device}. Move one."
            )
        self.scale = scale
        self.amax = amax

    @property
    def plan(self) -> TensorPlan:
        """One float32 scale for the tensor."""
        spec = _spec(self._format, (0, 0))
        return TensorPlan(spec, spec)

    @property
    def slot(self) -> Slot:
        """The given scale and amax, as views of one entry."""
        return Slot(self.scale.detach().view(1), self.amax.detach().view(1))

    def quantize_impl(self, tensor: torch.Tensor) -> QuantizedTensor:
        """Return ``tensor`` quantized by the scale, and record its amax.

        Raises:
            OperandError: the scale is on another device.
        """
        self._check_device(tensor)
        return super().quantize_impl(tensor)

    @property
    def cell(self) -> None:
        """None, as the scale is the quantizer's own."""
        return

    def update_quantized(
        self,
        src: torch.Tensor,
        dst: QuantizedTensor,
        *,
        noop_flag: torch.Tensor | None = None,
    ) -> QuantizedTensor:
        """Quantize ``src`` into ``dst`` by the scale, and record its amax; see the base."""
        self._check_device(dst)
        return super().update_quantized(src, dst, noop_flag=noop_flag)

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Set ``amax`` to that of ``tensor``."""
        desc = AmaxDesc(QuantizeDesc(tensor.dtype, self.plan.rowwise, None))
        matrix = tensor.detach().reshape(matrix_shape(tensor.shape))
        amax = table.resolve(desc, tensor.device).run(matrix)
        self.amax.detach().copy_(amax.reshape(self.amax.shape))

    def _check_device(self, tensor: torch.Tensor) -> None:
        if tensor.device != self.scale.device:
            raise OperandError(
                f"Float8Quantizer: the tensor is on {tensor.device}, the scale on "
                f"{self.scale.device}. Move one of them; nothing is moved silently."
            )


def _check_entry(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32 or tensor.numel() != 1:
        found = (
            f"{tensor.dtype} {list(tensor.shape)}"
            if isinstance(tensor, torch.Tensor)
            else type(tensor).__name__
        )
        raise OperandError(f"Float8Quantizer({name}={found}): expected one entry in float32.")


class ReducingQuantizer(Quantizer):
    """A quantizer whose amax can be that of a tensor that several processes hold in parts."""

    with_amax_reduction: bool
    amax_reduction_group: torch.distributed.ProcessGroup | None

    @property
    def reduce_amax(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The maximum over the group, if asked for."""
        if not self.with_amax_reduction:
            return None
        return _maximum_over(self.amax_reduction_group)

    def __getstate__(self) -> dict[str, object]:
        # A process group cannot be pickled.
        return {**self.__dict__, "amax_reduction_group": None}


class Float8CurrentScalingQuantizer(ReducingQuantizer):
    """One scale a tensor, from the amax of the tensor itself.

    Args:
        fp8_dtype: the element format, as ``DType.kFloat8E4M3``.
        device: accepted and unused, as in Transformer Engine: a cast runs where its tensor is.
        rowwise, columnwise: which orientations are made.
        with_amax_reduction: take the maximum of amaxes over ``amax_reduction_group``, of all
            processes if that is None; each holds a part of one tensor.
        force_pow_2_scales: round scales down to powers of two.
        amax_epsilon: lower bound of the amax.
        use_existing_amax, scale, amax: ignored with a DeprecationWarning, as in Transformer Engine.
    """

    def __init__(
        self,
        fp8_dtype: object,
        device: torch.device | str | int | None,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        use_existing_amax: bool = False,
        with_amax_reduction: bool = False,
        amax_reduction_group: torch.distributed.ProcessGroup | None = None,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        scale: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if use_existing_amax or scale is not None or amax is not None:
            warnings.warn(
                "Float8CurrentScalingQuantizer ignores use_existing_amax, scale and amax: its "
                "scale follows from the tensor. Float8Quantizer takes a scale.",
                DeprecationWarning,
                stacklevel=2,
            )
        owner = type(self).__name__
        self._format = _check_bits(owner, format_of(fp8_dtype, owner), 8)
        self.dtype = fp8_dtype
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.force_pow_2_scales = force_pow_2_scales
        self.amax_epsilon = amax_epsilon
        _ = self.plan  # a RecipeError belongs here

    @property
    def plan(self) -> TensorPlan:
        """One float32 scale for the tensor."""
        spec = _spec(
            self._format,
            (0, 0),
            power_of_two=self.force_pow_2_scales,
            amax_epsilon=self.amax_epsilon,
        )
        return TensorPlan(spec, spec)


class Float8BlockQuantizer(Quantizer):
    """A float32 scale for every 128 elements along the contraction, or for 128 x 128.

    Args:
        fp8_dtype: the element format, as ``DType.kFloat8E4M3``.
        rowwise, columnwise: which orientations are made.
        amax_epsilon: lower bound of a block's amax.
        force_pow_2_scales: round scales down to powers of two.
        block_scaling_dim: 1 for 1 x 128 blocks, 2 for 128 x 128.

    Raises:
        RecipeError: another ``block_scaling_dim``, or no 8-bit format.
    """

    def __init__(
        self,
        fp8_dtype: object,
        *,
        rowwise: bool,
        columnwise: bool,
        amax_epsilon: float = 0.0,
        force_pow_2_scales: bool = True,
        block_scaling_dim: int = 2,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        owner = type(self).__name__
        self._format = _check_bits(owner, format_of(fp8_dtype, owner), 8)
        self.dtype = fp8_dtype
        self.block_len = 128
        if block_scaling_dim not in (1, 2):
            raise RecipeError(f"{owner}(block_scaling_dim={block_scaling_dim!r}): expected 1 or 2.")
        self.amax_epsilon = amax_epsilon
        self.force_pow_2_scales = force_pow_2_scales
        self.block_scaling_dim = block_scaling_dim
        _ = self.plan  # a RecipeError belongs here

    @property
    def plan(self) -> TensorPlan:
        """Float32 scales of blocks."""
        spec = _spec(
            self._format,
            (1, 128) if self.block_scaling_dim == 1 else (128, 128),
            power_of_two=self.force_pow_2_scales,
            amax_epsilon=self.amax_epsilon,
        )
        return TensorPlan(spec, spec)


class MXFP8Quantizer(Quantizer):
    """A power-of-two scale in a byte for every 32 elements along the contraction.

    Args:
        fp8_dtype: the element format, as ``DType.kFloat8E4M3``.
        rowwise, columnwise: which orientations are made.
        with_2d_quantization: blocks of 32 x 32, which hold the same codes both ways.
    """

    def __init__(
        self,
        fp8_dtype: object,
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        with_2d_quantization: bool = False,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        owner = type(self).__name__
        self._format = _check_bits(owner, format_of(fp8_dtype, owner), 8)
        self.dtype = fp8_dtype
        self.with_2d_quantization = with_2d_quantization

    @property
    def plan(self) -> TensorPlan:
        """Scales in e8m0."""
        block = (32, 32) if self.with_2d_quantization else (1, 32)
        spec = _spec(self._format, block, scale_format="e8m0")
        return TensorPlan(spec, spec)
