"""Quantizers: objects that make a QuantizedTensor, with Transformer Engine's names and arguments.

A quantizer holds no format's arithmetic: it is a :class:`fp8core.plan.TensorPlan`, and which of the
plan's orientations to make. Backends compute, as for layers.
"""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import torch
import torch.distributed

from fp8core import formats
from fp8core.backend_api import AmaxDesc, OperandSpec, QuantizeDesc
from fp8core.dispatch import table
from fp8core.errors import OperandError, RecipeError
from fp8core.formats import DType, dtype_of, format_of
from fp8core.functional.quantizers.base import PlannedQuantizer, Quantizer
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.layouts import is_hybrid, kind_of
from fp8core.tensors.parameter.constructed import of_codes_and_scale, of_mx_blocks
from fp8core.tensors.quantized_tensor import QuantizedTensor, set_quantizers
from fp8core.tensors.quantizer import Slot
from fp8core.tensors.quantizer_binding import ReduceAmax
from fp8core.tensors.storage import BY_VALUE, Casting, matrix_shape, storage_plan

__all__ = [
    "DType",
    "Float8BlockQuantizer",
    "Float8CurrentScalingQuantizer",
    "Float8Quantizer",
    "HybridQuantizer",
    "IdentityQuantizer",
    "MXFP8Quantizer",
    "NVFP4Quantizer",
    "Quantizer",
]


def _plan_of(name: str, block: tuple[int, int], **fields: object) -> TensorPlan:
    """Return the plan of both orientations in one format, scaled to its maximum."""
    spec = OperandSpec(name, block, formats.by_name(name).max, **fields)  # type: ignore[arg-type]  # fields by name
    return TensorPlan(spec, spec)


def _byte_format_of(dtype: object, quantizer: Quantizer) -> str:
    owner = type(quantizer).__name__
    name = format_of(dtype, owner)
    if formats.by_name(name).bits != 8:
        raise RecipeError(f"{owner}({name!r}): expected a format of 8 bits.")
    return name


class _TensorScaled(Quantizer):
    """A quantizer whose tensors have one scale."""

    def create_tensor_from_data(
        self,
        data: torch.Tensor,
        fake_dtype: torch.dtype = torch.float32,
        requires_grad: bool = False,
        internal: bool = False,
    ) -> QuantizedTensor:
        """Return the tensor of codes ``data [..., k]``, which this quantizer writes too, with the
        reciprocal of its scale, 1 if it has none before a cast; ``internal`` changes nothing.

        Raises:
            OperandError: ``data`` are no such codes, or the scale is on another device.
        """
        name = self.plan.rowwise.format  # type: ignore[union-attr]  # of one scale it has both
        codes: dict[str, Any] = {"data": data, "fp8_dtype": name, "quantizer": self}
        scale_inv = self._scale_inv_on(data.device)
        tensor = of_codes_and_scale(fake_dtype, fp8_scale_inv=scale_inv, **codes)
        tensor.requires_grad_(requires_grad)
        return tensor

    def _scale_inv_on(self, device: torch.device) -> torch.Tensor:
        raise NotImplementedError


class Float8Quantizer(_TensorScaled):
    """A given scale for the tensor: that of delayed scaling, or a constant.

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
        self._format = _byte_format_of(fp8_dtype, self)
        self.dtype = fp8_dtype
        for name, entry in (("scale", scale), ("amax", amax)):
            _check_entry(name, entry)
        if scale.device != amax.device:
            raise OperandError(
                f"Float8Quantizer: scale is on {scale.device}, amax on {amax.device}. Move one."
            )
        self.scale = scale
        self.amax = amax

    @property
    def plan(self) -> TensorPlan:
        """A float32 scale for the tensor."""
        return _plan_of(self._format, (0, 0))

    @property
    def slot(self) -> Slot:
        """The given scale and amax, as views of one entry."""
        return Slot(self.scale.detach().view(1), self.amax.detach().view(1))

    @property
    def cell(self) -> None:
        """None, as the scale is the quantizer's own."""
        return

    def _scale_inv_on(self, device: torch.device) -> torch.Tensor:
        self._slot_on(device)
        return 1 / self.scale.detach()

    def calibrate(self, tensor: torch.Tensor) -> None:
        """Set ``amax`` to that of ``tensor``."""
        desc = AmaxDesc(QuantizeDesc(tensor.dtype, self.plan.rowwise, None))
        matrix = tensor.detach().reshape(matrix_shape(tensor.shape))
        amax = table.resolve(desc, tensor.device).run(matrix)
        self.amax.detach().copy_(amax.reshape(self.amax.shape))


def _check_entry(name: str, tensor: object) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32 or tensor.numel() != 1:
        shown = (
            f"{tensor.dtype} {list(tensor.shape)}"
            if isinstance(tensor, torch.Tensor)
            else type(tensor).__name__
        )
        raise OperandError(f"Float8Quantizer({name}={shown}): expected one entry in float32.")


class ReducingQuantizer(Quantizer):
    """A quantizer whose amax can be that of a tensor that several processes hold in parts."""

    with_amax_reduction: bool
    amax_reduction_group: torch.distributed.ProcessGroup | None

    @property
    def reduce_amax(self) -> ReduceAmax | None:
        """The maximum over the group, if asked for; raises OperandError when it is called and
        torch.distributed is not initialized."""
        return self._maximum if self.with_amax_reduction else None

    def _maximum(self, amaxes: torch.Tensor) -> torch.Tensor:
        if not torch.distributed.is_available() or not torch.distributed.is_initialized():
            raise OperandError(
                "with_amax_reduction=True needs torch.distributed.init_process_group first."
            )
        reduced, group = amaxes.contiguous(), self.amax_reduction_group
        torch.distributed.all_reduce(reduced, op=torch.distributed.ReduceOp.MAX, group=group)
        return reduced

    def __getstate__(self) -> dict[str, object]:
        # A process group cannot be pickled.
        return {**super().__getstate__(), "amax_reduction_group": None}


class Float8CurrentScalingQuantizer(ReducingQuantizer, _TensorScaled):
    """A scale for the tensor, from the amax of the tensor itself.

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
        self._format = _byte_format_of(fp8_dtype, self)
        self.dtype = fp8_dtype
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.force_pow_2_scales = force_pow_2_scales
        self.amax_epsilon = amax_epsilon
        _ = self.plan  # a RecipeError belongs here

    @property
    def plan(self) -> TensorPlan:
        """A float32 scale for the tensor."""
        return _plan_of(
            self._format,
            (0, 0),
            power_of_two=self.force_pow_2_scales,
            amax_epsilon=self.amax_epsilon,
        )

    def _scale_inv_on(self, device: torch.device) -> torch.Tensor:
        return torch.ones(1, dtype=torch.float32, device=device)


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
        self._format = _byte_format_of(fp8_dtype, self)
        self.dtype = fp8_dtype
        self.block_len = 128
        if block_scaling_dim not in (1, 2):
            raise RecipeError(
                f"{type(self).__name__}(block_scaling_dim={block_scaling_dim!r}): expected 1 or 2."
            )
        self.amax_epsilon = amax_epsilon
        self.force_pow_2_scales = force_pow_2_scales
        self.block_scaling_dim = block_scaling_dim
        _ = self.plan  # a RecipeError belongs here

    @property
    def plan(self) -> TensorPlan:
        """Float32 scales of blocks."""
        return _plan_of(
            self._format,
            (1, 128) if self.block_scaling_dim == 1 else (128, 128),
            power_of_two=self.force_pow_2_scales,
            amax_epsilon=self.amax_epsilon,
        )


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
        self._format = _byte_format_of(fp8_dtype, self)
        self.dtype = fp8_dtype
        self.with_2d_quantization = with_2d_quantization

    @property
    def plan(self) -> TensorPlan:
        """Scales in e8m0."""
        block = (32, 32) if self.with_2d_quantization else (1, 32)
        return _plan_of(self._format, block, scale_format="e8m0")

    def create_tensor_from_data(
        self,
        data: torch.Tensor,
        scale_inv: torch.Tensor,
        fake_dtype: torch.dtype,
        fp8_dtype: object = DType.kFloat8E4M3,
    ) -> QuantizedTensor:
        """Return the tensor of codes ``data [..., k]`` with scales ``[n, k / 32]``, which may be
        padded.

        Raises:
            OperandError: they do not fit one another, or this quantizer.
        """
        return of_mx_blocks(
            fake_dtype,
            rowwise_data=data,
            rowwise_scale_inv=scale_inv,
            fp8_dtype=fp8_dtype,
            quantizer=self,
        )


class NVFP4Quantizer(ReducingQuantizer):
    """e2m1 elements, an e4m3 scale for every 16 along the contraction, one float32 scale above.

    Args:
        fp4_dtype: ``DType.kFloat4E2M1``.
        rowwise, columnwise: which orientations are made.
        with_amax_reduction: take the maximum of amaxes over ``amax_reduction_group``, of all
            processes if that is None; each holds a part of one tensor.
        with_rht: the columnwise operand is transformed by a Hadamard matrix of 16 along its rows'
            contraction first. Its amax is always that of the transformed elements, so
            ``with_post_rht_amax`` says nothing more.
        with_2d_quantization: blocks of 16 x 16.
        stochastic_rounding: elements are rounded up or down with probabilities that keep the mean.
        row_scaled_nvfp4: a float32 scale for each row instead of one for the tensor.
        nvfp4_use_4over6: each block maps its amax to 6 or to 4, whichever loses less.
        nvfp4_e4m3_max: with ``nvfp4_use_4over6`` the value that the largest block scale maps to,
            448 or 256; unused without it.
        nvfp4_4over6_err_mode: what is compared, ``"MAE"`` or ``"MSE"``.
        with_random_sign_mask: the transform takes its fixed signs; False leaves them out.

    Raises:
        RecipeError: an option has another value, or rules another one out; see
            :class:`fp8core.backend_api.OperandSpec`.
    """

    def __init__(
        self,
        fp4_dtype: object = DType.kFloat4E2M1,
        rowwise: bool = True,
        columnwise: bool = True,
        with_amax_reduction: bool = False,
        amax_reduction_group: torch.distributed.ProcessGroup | None = None,
        with_rht: bool = False,
        with_post_rht_amax: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        with_random_sign_mask: bool = True,
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        owner = type(self).__name__
        if format_of(fp4_dtype, owner) != "e2m1":
            raise RecipeError(f"{owner}(fp4_dtype={fp4_dtype!r}): expected DType.kFloat4E2M1.")
        mode = nvfp4_4over6_err_mode
        if not isinstance(mode, str) or mode.upper() not in ("MAE", "MSE"):
            raise RecipeError(f"{owner}(nvfp4_4over6_err_mode={mode!r}): expected 'MAE' or 'MSE'.")
        self.dtype = fp4_dtype
        self.with_amax_reduction = with_amax_reduction
        self.amax_reduction_group = amax_reduction_group
        self.with_rht = with_rht
        self.with_post_rht_amax = with_post_rht_amax
        self.with_2d_quantization = with_2d_quantization
        self.stochastic_rounding = stochastic_rounding
        self.row_scaled_nvfp4 = row_scaled_nvfp4
        self.nvfp4_use_4over6 = nvfp4_use_4over6
        self.nvfp4_e4m3_max = nvfp4_e4m3_max if nvfp4_use_4over6 else 448
        self.nvfp4_4over6_err_mode = mode.upper()
        self.with_random_sign_mask = with_random_sign_mask
        _ = self.plan  # a RecipeError belongs here

    @property
    def plan(self) -> TensorPlan:
        """Scales of two levels."""
        plan = _plan_of(
            "e2m1",
            (16, 16) if self.with_2d_quantization else (1, 16),
            scale_format="e4m3",
            stochastic=self.stochastic_rounding,
            row_scaled=self.row_scaled_nvfp4,
            four_over_six=self.nvfp4_4over6_err_mode if self.nvfp4_use_4over6 else None,
            scale_max=float(self.nvfp4_e4m3_max),
        )
        row = plan.rowwise
        if not self.with_rht or row is None:
            return plan
        name = "hadamard16" if self.with_random_sign_mask else "hadamard16_unsigned"
        return TensorPlan(row, dataclasses.replace(row, transform=name))


class IdentityQuantizer(Quantizer):
    """Leaves a tensor in high precision: for a factory's answer, or one half of a HybridQuantizer.

    Called, it returns the tensor, in ``dtype`` if that is given.
    """

    def __init__(
        self, *, dtype: torch.dtype | None = None, rowwise: bool = True, columnwise: bool = True
    ) -> None:
        super().__init__(rowwise=rowwise, columnwise=columnwise)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise RecipeError(f"IdentityQuantizer(dtype={dtype!r}): expected a floating dtype.")
        self.dtype = dtype

    @property
    def plan(self) -> TensorPlan:
        """No orientation is quantized."""
        return TensorPlan(None, None)

    @property
    def cell(self) -> TensorPlan:
        """The plan, which says all that a layer does with it."""
        return self.plan

    def quantize(  # type: ignore[override]  # no QuantizedTensor
        self,
        tensor: torch.Tensor,
        *,
        out: Any = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """Return ``tensor``, in the quantizer's dtype, else in ``dtype``, or copy it to ``out``."""
        if out is not None:
            return self.update_quantized(tensor, out)
        chosen = self.dtype or dtype
        return tensor if chosen is None else tensor.to(chosen)

    def _updated(self, src: torch.Tensor, dst: Any, noop_flag: torch.Tensor | None) -> Any:
        if not isinstance(dst, torch.Tensor) or dst.shape != src.shape:
            shown = list(dst.shape) if isinstance(dst, torch.Tensor) else type(dst).__name__
            raise OperandError(
                f"{self}.update_quantized: {list(src.shape)} into {shown}; expected a tensor of "
                f"that shape, as make_empty(shape) makes."
            )
        with torch.no_grad():
            if noop_flag is not None:
                src = torch.where(noop_flag.reshape(()) != 0, dst, src)
            return dst.copy_(src)

    def __repr__(self) -> str:
        return "IdentityQuantizer()" if self.dtype is None else f"IdentityQuantizer({self.dtype})"


class HybridQuantizer(PlannedQuantizer):
    """Quantizes rowwise as one quantizer does, and columnwise as another.

    The result's ``rowwise_sub_storage`` and ``columnwise_sub_storage`` are its parts; that of an
    :class:`IdentityQuantizer` beside a quantized one is a plain copy of the value. Where what is
    used are orientations of identities alone, it returns the tensor itself, as those do.

    Args:
        rowwise_quantizer, columnwise_quantizer: quantizers whose plans say all that they do; their
            usages do not matter.
        columnwise_source: what is quantized columnwise: ``"original"`` the tensor itself,
            ``"rowwise_dequantized"`` the value of its rowwise operand, so that both orientations
            are roundings of that value. A layer then calls the quantizer, as an object of a user;
            where an :class:`IdentityQuantizer` has the columns, it computes as with
            ``backward_override="dequantized"``.

    Raises:
        OperandError: a quantizer has a state or code of its own.
        RecipeError: another source; or two IdentityQuantizers of different dtypes.
    """

    def __init__(
        self,
        *,
        rowwise_quantizer: Quantizer,
        columnwise_quantizer: Quantizer,
        columnwise_source: str = "original",
    ) -> None:
        cells = []
        quantizers = {"rowwise": rowwise_quantizer, "columnwise": columnwise_quantizer}
        for way, quantizer in quantizers.items():
            cell = quantizer.cell if isinstance(quantizer, Quantizer) else None
            if cell is None or quantizer.dequantizes:
                raise OperandError(
                    f"HybridQuantizer({way}_quantizer={quantizer!r}): expected a quantizer of "
                    f"fp8core without a state or code of its own."
                )
            cells.append(cell)
        plan = TensorPlan(cells[0].rowwise, cells[1].columnwise)
        if columnwise_source not in ("original", "rowwise_dequantized"):
            raise RecipeError(
                f"HybridQuantizer(columnwise_source={columnwise_source!r}): expected 'original' or "
                f"'rowwise_dequantized'."
            )
        dtypes = [each.dtype for each in quantizers.values() if isinstance(each, IdentityQuantizer)]
        if len(set(dtypes)) > 1:
            raise RecipeError(
                f"HybridQuantizer of IdentityQuantizers of {dtypes}: expected one dtype, as one "
                f"tensor is both orientations."
            )
        super().__init__(plan)
        self.rowwise_quantizer = rowwise_quantizer
        self.columnwise_quantizer = columnwise_quantizer
        self.columnwise_source = columnwise_source

    @property
    def columns_of(self) -> OperandSpec | None:
        """How the rows are stored, if they are the source of the columns."""
        is_source = self.columnwise_source == "rowwise_dequantized"
        return storage_plan(self.plan).rowwise if is_source else None

    @property
    def dequantizes(self) -> bool:
        """Whether the columns are the value of the rows, in high precision."""
        return self.columns_of is not None and self.plan.columnwise is None

    @property
    def _casting(self) -> Casting:
        """How a value is cast besides by the plan, and whether the result holds it as well."""
        is_mixed = (self.plan.rowwise is None) != (self.plan.columnwise is None)
        keeps_value = is_mixed and self.rowwise_usage and self.columnwise_usage
        identity = self.columnwise_quantizer if self.plan.rowwise else self.rowwise_quantizer
        dtype = identity.dtype if isinstance(identity, IdentityQuantizer) else None
        return Casting(columns_of=self.columns_of, keeps_value=keeps_value, value_dtype=dtype)

    @property
    def cell(self) -> TensorPlan | None:
        """The plan; None where the columnwise operand is of another value, which no plan says."""
        is_cast_twice = self.columns_of is not None and self.plan.columnwise is not None
        return None if is_cast_twice or self._parameter_casting is None else self.plan

    @property
    def _parameter_casting(self) -> Casting | None:
        """By what a parameter is written, of which a class with code of its own says nothing."""
        mine = (type(self).quantize, type(self).quantize_impl, type(self).__call__)
        theirs = (HybridQuantizer.quantize, HybridQuantizer.quantize_impl, Quantizer.__call__)
        return Casting(columns_of=self.columns_of) if mine == theirs else None

    def quantize(
        self,
        tensor: torch.Tensor,
        *,
        out: Any = None,
        dtype: torch.dtype | None = None,
    ) -> Any:
        """Quantize ``tensor``; return it as it is where IdentityQuantizers have what is used."""
        if self._identity is None:
            return super().quantize(tensor, out=out, dtype=dtype)
        return self._identity.quantize(self._source(tensor), out=out, dtype=dtype)

    def _updated(self, src: torch.Tensor, dst: Any, noop_flag: torch.Tensor | None) -> Any:
        if self._identity is None:
            return super()._updated(src, dst, noop_flag)
        return self._identity._updated(self._source(src), dst, noop_flag)

    @property
    def _identity(self) -> Quantizer | None:
        """The IdentityQuantizer of what is used; None where some of it is quantized."""
        row, column = self.plan
        rows, columns = self.rowwise_usage, self.columnwise_usage
        if (rows and row) or (columns and column) or not (rows or columns):
            return None
        return self.rowwise_quantizer if rows else self.columnwise_quantizer

    def _source(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what the IdentityQuantizer takes for ``tensor``."""
        if not self.dequantizes:
            return tensor
        return PlannedQuantizer(self.plan, columnwise=False)(tensor).dequantize()


def quantizer_of(plan: TensorPlan, casting: Casting = BY_VALUE) -> Quantizer:
    """Return a quantizer that stores tensors by ``plan``, in its orientations, and by
    ``casting``."""
    row = casting.columns_of
    source = "original" if row is None else "rowwise_dequantized"
    if casting.keeps_value:
        return _hybrid(plan, source, casting.value_dtype)
    quantizer = _by_plan(plan, casting.slot)
    if row is not None and plan.columnwise is not None:
        quantizer = _hybrid(TensorPlan(row, plan.columnwise), source)
    pairs = zip(plan, storage_plan(quantizer.plan), strict=True)
    if any(spec not in (None, stored) for spec, stored in pairs):
        quantizer = PlannedQuantizer(plan)
    quantizer.set_usage(rowwise=plan.rowwise is not None, columnwise=plan.columnwise is not None)
    return quantizer


def _by_plan(plan: TensorPlan, slot: Slot | None) -> Quantizer:
    """Return the quantizer of Transformer Engine's whose plan is the most like ``plan``."""
    row, column = plan
    spec = row or column
    assert spec is not None
    if is_hybrid(plan):
        return _hybrid(plan, "original")
    dtype = dtype_of(spec.format)
    options: dict[str, Any] = {
        "force_pow_2_scales": spec.power_of_two,
        "amax_epsilon": spec.amax_epsilon,
    }
    match kind_of(spec):
        case "Float8Tensor" if slot is not None:
            amax = torch.zeros_like(slot.scale) if slot.amax is None else slot.amax
            return Float8Quantizer(slot.scale, amax, dtype)
        case "Float8Tensor":
            return Float8CurrentScalingQuantizer(dtype, None, **options)
        case "Float8BlockwiseQTensor":
            options["block_scaling_dim"] = 1 if spec.block[0] == 1 else 2
            return Float8BlockQuantizer(dtype, rowwise=True, columnwise=True, **options)
        case "MXFP8Tensor":
            return MXFP8Quantizer(dtype, with_2d_quantization=spec.block[0] > 1)
        case "NVFP4Tensor":
            return NVFP4Quantizer(
                with_rht=column is not None and column.transform is not None,
                with_random_sign_mask=column is None or column.transform != "hadamard16_unsigned",
                with_2d_quantization=spec.block[0] > 1,
                stochastic_rounding=spec.stochastic,
                row_scaled_nvfp4=spec.row_scaled,
                nvfp4_use_4over6=spec.four_over_six is not None,
                nvfp4_e4m3_max=int(spec.scale_max),
                nvfp4_4over6_err_mode=spec.four_over_six or "MAE",
            )
    return PlannedQuantizer(plan)


def _hybrid(plan: TensorPlan, source: str, dtype: torch.dtype | None = None) -> HybridQuantizer:
    identity = IdentityQuantizer(dtype=dtype)
    rowwise, columnwise = (
        _by_plan(TensorPlan(each, each), None) if each else identity for each in plan
    )
    return HybridQuantizer(
        rowwise_quantizer=rowwise, columnwise_quantizer=columnwise, columnwise_source=source
    )


set_quantizers(quantizer_of)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)
