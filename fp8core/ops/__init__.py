"""Operations to combine into a chain, which runs as one autograd node.

``ops.Sequential(ops.RMSNorm(512), ops.Linear(512, 2048), ops.SwiGLU(), ops.Linear(1024, 512))`` is
a chain, as each of the library's layers is. An operation can quantize its result for the linear
that follows, by a fused operation if the backend has one. Any layer of the library can be an
operation. Modules of torch, and a user's own operations (:class:`BasicOperation`), run between the
chains.

An operation with parameters casts its input to their dtype and computes in it; an operation without
parameters computes in the dtype of its input. Under torch.autocast both compute in its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from typing_extensions import override

from fp8core.chain.boundary import QuantizeShape
from fp8core.chain.shape import LinkShape
from fp8core.chain.simple import BiasShape, DropoutShape
from fp8core.errors import OperandError
from fp8core.modules.calls.inputs import cast_to_weight, check_kind
from fp8core.modules.calls.parameters import (
    InitMethod,
    check_probability,
    check_size,
    fill,
    make_parameter,
    refuse_arguments,
    resolve_device,
)
from fp8core.modules.layers.grouped_linear import GroupedLinear as GroupedLinearLayer
from fp8core.modules.layers.linear import Linear as LinearLayer
from fp8core.modules.layers.norm import LayerNorm, RMSNorm
from fp8core.modules.layers.operation import (
    AddExtraInput,
    AllGather,
    AllReduce,
    ConstantScale,
    Identity,
    L2Normalization,
    MakeExtraOutput,
    Operation,
    ReduceScatter,
    Reshape,
)
from fp8core.modules.layers.parallel import Parallel
from fp8core.names import refusal
from fp8core.ops.activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ErfGELU,
    ReGLU,
    ReLU,
    ScaledClampedQGeGLU,
    ScaledSiTUGLU,
    ScaledSReLU,
    ScaledSwiGLU,
    ScaledTanhSReLU,
    SiLU,
    SiTUGLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from fp8core.ops.basic_operation import (
    BasicOperation,
    FusedOperation,
    FusibleOperation,
    OperationContext,
    register_backward_fusion,
    register_forward_backward_fusion,
    register_forward_fusion,
)
from fp8core.ops.sequential import Sequential

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "AllGather",
    "AllReduce",
    "BasicLinear",
    "BasicOperation",
    "Bias",
    "ClampedSwiGLU",
    "ConstantScale",
    "Dropout",
    "ErfGELU",
    "FusedOperation",
    "FusibleOperation",
    "GroupedLinear",
    "Identity",
    "L2Normalization",
    "LayerNorm",
    "Linear",
    "MakeExtraOutput",
    "OperationContext",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "ReduceScatter",
    "Reshape",
    "SReGLU",
    "SReLU",
    "ScaledClampedQGeGLU",
    "ScaledSReLU",
    "ScaledSiTUGLU",
    "ScaledSwiGLU",
    "ScaledTanhSReLU",
    "Sequential",
    "SiLU",
    "SiTUGLU",
    "SwiGLU",
    "register_backward_fusion",
    "register_forward_backward_fusion",
    "register_forward_fusion",
]
__dir__ = partial(sorted, __all__)


_uniform: InitMethod = partial(torch.nn.init.kaiming_uniform_, a=5**0.5)  # +-1 / sqrt(in_features)


class Linear(LinearLayer):
    """:class:`fp8core.Linear` as an operation, with the arguments and initial values of Transformer
    Engine's: weights start as those of ``torch.nn.Linear``, biases as zeros.

    Args:
        in_features, out_features, bias, device: as for ``fp8core.Linear``.
        dtype: of the parameters, torch's default if None; ``params_dtype`` is another name for it.
        accumulate_into_main_grad: ``fuse_wgrad_accumulation`` of ``fp8core.Linear``.
        init_method, parameters_split, name: as for ``fp8core.Linear``.
        tensor_parallel_mode, sequence_parallel: ``parallel_mode`` and ``sequence_parallel`` of
            ``fp8core.Linear``, over the ranks of ``tensor_parallel_group``, the default group if
            None.
        rng_state_tracker_function: ``get_rng_state_tracker`` of ``fp8core.Linear``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: object | None = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__(
            in_features,
            out_features,
            bias=bias,
            device=device,
            params_dtype=params_dtype or dtype,
            fuse_wgrad_accumulation=accumulate_into_main_grad,
            init_method=init_method or _uniform,
            parameters_split=parameters_split,
            name=name,
            parallel_mode=tensor_parallel_mode,
            tp_group=_group(tensor_parallel_mode is not None, tensor_parallel_group),
            sequence_parallel=sequence_parallel,
            get_rng_state_tracker=rng_state_tracker_function,
        )

    def forward(self, input: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        """Compute as :meth:`fp8core.Linear.forward` does, from an input of any dtype."""
        weight = self.parameter(f"{self._parts[0][0]}weight")
        return super().forward(cast_to_weight(input, weight), *arguments, **keywords)


class BasicLinear(Linear):
    """``ops.Linear`` without a bias."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel_mode: str | None = None,
        tensor_parallel_group: object | None = None,
        sequence_parallel: bool = False,
        rng_state_tracker_function: Callable[[], Any] | None = None,
        accumulate_into_main_grad: bool = False,
        userbuffers_options: object | None = None,
    ) -> None:
        refused = ("userbuffers_options",)
        refuse_arguments(BasicLinear.__init__, locals(), refused, owner="ops.BasicLinear")
        super().__init__(
            in_features,
            out_features,
            bias=False,
            device=device,
            dtype=dtype,
            tensor_parallel_mode=tensor_parallel_mode,
            tensor_parallel_group=tensor_parallel_group,
            sequence_parallel=sequence_parallel,
            rng_state_tracker_function=rng_state_tracker_function,
            accumulate_into_main_grad=accumulate_into_main_grad,
        )


class GroupedLinear(GroupedLinearLayer):
    """:class:`fp8core.GroupedLinear` as an operation, with the arguments and initial values of
    Transformer Engine's; the sizes of the groups are its extra input.

    Args:
        num_groups, in_features, out_features, bias, device: as in :class:`fp8core.GroupedLinear`,
            where ``num_groups`` is ``num_gemms``.
        dtype: of the parameters, torch's default if None.
        accumulate_into_main_grad, delay_wgrad_compute: ``fuse_wgrad_accumulation`` and
            ``delay_wgrad_compute`` of :class:`fp8core.GroupedLinear`.
        single_grouped_weight, single_grouped_bias: as in :class:`fp8core.GroupedLinear`.
        scale_bias: a second extra input, ``scales``, has a number for each row, by which the row's
            bias is multiplied before it is added; of a layer with biases.
    """

    scale_bias = False  # of one that an earlier version pickled

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        rng_state_tracker_function: object | None = None,
        accumulate_into_main_grad: bool = False,
        single_grouped_weight: bool = False,
        single_grouped_bias: bool = False,
        delay_wgrad_compute: bool = False,
        scale_bias: bool = False,
        name: str | None = None,
    ) -> None:
        refused = ("rng_state_tracker_function",)
        refuse_arguments(GroupedLinear.__init__, locals(), refused, owner="ops.GroupedLinear")
        self.num_groups, self.scale_bias = num_groups, bool(bias and scale_bias)
        super().__init__(
            num_groups,
            in_features,
            out_features,
            fuse_wgrad_accumulation=accumulate_into_main_grad,
            init_method=_uniform,
            bias=bias,
            params_dtype=dtype,
            device=device,
            delay_wgrad_compute=delay_wgrad_compute,
            single_grouped_weight=single_grouped_weight,
            single_grouped_bias=single_grouped_bias,
            name=name,
        )

    @property
    def num_extra_inputs(self) -> int:  # type: ignore[override]  # follows from the arguments
        """The sizes of the groups, and the scales of the biases if there are any."""
        return 2 if self.scale_bias else 1

    @property
    def adds_bias(self) -> bool:
        """Whether the products add the biases, which are scaled otherwise."""
        return self.use_bias and not self.scale_bias

    def forward(  # type: ignore[override]  # the operation's names
        self,
        input: torch.Tensor,
        split_sizes: Sequence[int] | torch.Tensor,
        scales: torch.Tensor | None = None,
        *,
        output: torch.Tensor | None = None,
        grad_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute as :meth:`fp8core.GroupedLinear.forward` does, with ``output`` for ``out`` and
        ``grad_input`` for ``dgrad_out``.

        ``scales``, of the shape of the input without its last dimension, are given with
        ``scale_bias`` alone, without ``output``. Rows of no group have no bias.

        Raises:
            OperandError: as of :class:`fp8core.GroupedLinear`; or ``scales`` that do not fit.
        """
        weight = self._all("weight")[0]
        if self.scale_bias != (scales is not None) or (scales is not None and output is not None):
            raise OperandError(
                f"ops.GroupedLinear(scale_bias={self.scale_bias}): expected "
                f"{'scales, and no output' if self.scale_bias else 'no scales'}."
            )
        result = super().forward(
            cast_to_weight(input, weight), split_sizes, out=output, dgrad_out=grad_input
        )
        assert isinstance(result, torch.Tensor)  # the bias is never returned
        return result if scales is None else self._with_bias(result, split_sizes, scales)

    def _with_bias(
        self, result: torch.Tensor, sizes: Sequence[int] | torch.Tensor, scales: torch.Tensor
    ) -> torch.Tensor:
        """Return ``result`` plus the bias of each row's group times the row's scale, in float32."""
        check_kind("ops.GroupedLinear", "scales", scales)
        if scales.shape != result.shape[:-1] or scales.device != result.device:
            raise OperandError(
                f"ops.GroupedLinear: scales {list(scales.shape)} on {scales.device}; expected "
                f"{list(result.shape[:-1])} on {result.device}."
            )
        ends = torch.as_tensor(sizes, device=result.device).clamp(min=0).cumsum(0)
        positions = torch.arange(scales.numel(), device=result.device)
        biases = torch.stack(self._all("bias"))
        of_rows = torch.nn.functional.pad(biases, (0, 0, 0, 1))  # the last one of no group
        bias = of_rows[torch.searchsorted(ends, positions, right=True)].view(result.shape)
        return (result.float() + bias.float() * scales.unsqueeze(-1).float()).to(result.dtype)


def _group(is_parallel: bool, group: object | None) -> object | None:
    """Return ``group``, for a parallel operation without a group the default group, if torch has
    initialized that."""
    if not is_parallel or group is not None:
        return group
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    return torch.distributed.group.WORLD


class Bias(Operation):
    """``x + bias``, with one value for each column.

    ``tensor_parallel``: each rank of ``tensor_parallel_group``, the default group if None, has its
    share of the ``size`` columns.
    """

    bias: torch.nn.Parameter

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        tensor_parallel: bool = False,
        tensor_parallel_group: object | None = None,
    ) -> None:
        super().__init__(None)
        group = _group(tensor_parallel, tensor_parallel_group) if tensor_parallel else None
        parallel = Parallel.of("ops.Bias", group, 1, sequence=False)
        self.size = parallel.part_of("ops.Bias", "size", check_size("ops.Bias", "size", size))
        target = resolve_device(device)
        self.register_parameter("bias", make_parameter(self.size, device=target, dtype=dtype))
        if target.type != "meta":
            self.reset_parameters()

    def _fill_parameters(self) -> None:
        fill(self.bias, torch.nn.init.zeros_)

    @override
    def link_shapes(self) -> tuple[LinkShape, ...]:
        return (BiasShape(self.size, self.bias.dtype),)

    @override
    def link_params(self) -> list[torch.Tensor]:
        return [self.bias]


class Dropout(Operation):
    """Zeroes elements with probability ``p`` in training and scales the rest by ``1 / (1 - p)``.

    The mask follows from a seed drawn in forward, so no mask is saved, and a recompute repeats the
    mask.
    """

    shape_fields = ("p",)

    def __init__(self, p: float) -> None:
        super().__init__(None)
        self.p = check_probability("ops.Dropout", "p", p)

    def link_shapes(self) -> tuple[LinkShape, ...]:
        """Return the dropout's shape, whose probability is 0 in evaluation."""
        return (DropoutShape(self.p if self.training else 0.0),)


class Quantize(Operation):
    """Quantizes values, gradients or both as the recipe does.

    At the end of a chain the output is a :class:`~fp8core.QuantizedTensor`, which a next layer
    takes as it is; at the beginning of a chain the gradient of the input is one. In between, values
    and gradients are rounded to the format and back. Scales follow from the amaxes of the values,
    and rounding is to the nearest, also if the GEMMs of the recipe take delayed scales or round
    stochastically. Where blocks do not divide the columns, the chain returns plain tensors of the
    rounded values; without a recipe nothing is rounded.
    """

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__(None)
        self._shape = QuantizeShape(forward, backward)

    def link_shapes(self) -> tuple[LinkShape, ...]:
        """Return the shape, which says whether values, gradients or both are rounded."""
        return (self._shape,)


if not TYPE_CHECKING:  # a type checker would take every name for an attribute

    def __getattr__(name: str) -> NoReturn:
        """Raise AttributeError, which names the alternative to a name of Transformer Engine."""
        text = refusal(f"ops.{name}") or f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(text)
