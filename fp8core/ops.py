"""Operations to combine into a chain, which runs as one autograd node.

``ops.Sequential(ops.RMSNorm(512), ops.Linear(512, 2048), ops.SwiGLU(), ops.Linear(1024, 512))`` is
such a chain; the library's layers are chains too. An operation can quantize its result for the
linear that follows it, by a fused operation if the backend has one. Any layer of the library can be
an operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch

from fp8core.chain.pointwise import AddShape, BiasShape, DropoutShape, QuantizeShape
from fp8core.chain.shape import LinkShape, input_columns_of
from fp8core.errors import OperandError, UnsupportedError
from fp8core.modules.activation import (
    GEGLU,
    GELU,
    GLU,
    QGEGLU,
    QGELU,
    ClampedSwiGLU,
    ReGLU,
    ReLU,
    SiLU,
    SReGLU,
    SReLU,
    SwiGLU,
)
from fp8core.modules.base import LowPrecisionModule
from fp8core.modules.inputs import check_kind
from fp8core.modules.linear import Linear as LinearLayer
from fp8core.modules.norm import LayerNorm, RMSNorm
from fp8core.modules.operation import Operation
from fp8core.modules.parameters import InitMethod, check_size, fill, make_parameter, resolve_device
from fp8core.modules.refusals import refuse_arguments
from fp8core.modules.run import run_layer
from fp8core.not_offered import refusal

__all__ = [
    "GEGLU",
    "GELU",
    "GLU",
    "QGEGLU",
    "QGELU",
    "AddExtraInput",
    "Bias",
    "ClampedSwiGLU",
    "Dropout",
    "LayerNorm",
    "Linear",
    "Quantize",
    "RMSNorm",
    "ReGLU",
    "ReLU",
    "SReGLU",
    "SReLU",
    "Sequential",
    "SiLU",
    "SwiGLU",
]


class Sequential(LowPrecisionModule):
    """Runs its operations as one chain.

    The input ``[..., k]`` goes into the first operation; each :class:`AddExtraInput` takes one
    further argument of the call, in order. A Sequential inside another is part of its chain. The
    outermost one holds the delayed-scaling state of all its linears.

    Raises:
        OperandError: an argument is no operation, the sizes of two operations do not fit, or a call
            has the wrong number of extra inputs.
        UnsupportedError: a layer returns more than one tensor, or takes groups.
    """

    kind = "sequential"

    def __init__(self, *operations: LowPrecisionModule, name: str | None = None) -> None:
        super().__init__(name)
        if not operations:
            raise OperandError("ops.Sequential() needs at least one operation.")
        for index, operation in enumerate(operations):
            if not isinstance(operation, LowPrecisionModule):
                raise OperandError(
                    f"ops.Sequential: operation {index} is {type(operation).__name__}; expected "
                    f"one of fp8core.ops or a layer of fp8core."
                )
            self.add_module(str(index), operation)
        self._check_single_outputs()
        self._check_sizes()

    def _operations(self) -> list[LowPrecisionModule]:
        """Return the operations in order; a nested Sequential stands for its operations."""
        operations: list[LowPrecisionModule] = []
        for child in self.children():
            if isinstance(child, Sequential):
                operations += child._operations()
            elif isinstance(child, LowPrecisionModule):
                operations.append(child)
        return operations

    def _check_single_outputs(self) -> None:
        for operation in self._operations():
            shapes = operation.link_shapes()
            leaves = any(shape.leaves_chain for shape in shapes)
            grouped = any(shape.groups for shape in shapes)
            if leaves or grouped or getattr(operation, "return_bias", False):
                reason = "takes m_splits" if grouped else "returns more than one tensor"
                raise UnsupportedError(f"ops.Sequential: {operation.label} {reason}.")

    def _check_sizes(self) -> None:
        width = input_columns_of(self.link_shapes())
        if width is None:  # no operation has a size
            return
        for index, operation in enumerate(self._operations()):
            for shape in operation.link_shapes():
                expected = shape.expected_columns(width)
                if expected is not None:
                    raise OperandError(
                        f"ops.Sequential: operation {index}, {operation.label}, takes {expected} "
                        f"columns, but gets {width}."
                    )
                width = shape.columns(width)

    def link_shapes(self) -> tuple[LinkShape, ...]:
        """Return the shapes of all operations."""
        operations = self._operations()
        return tuple(shape for operation in operations for shape in operation.link_shapes())

    def link_params(self) -> list[torch.Tensor]:
        """Return the parameters of all operations; extra inputs come with the call."""
        return [param for operation in self._operations() for param in operation.link_params()]

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor) -> torch.Tensor:
        """Run the operations on ``input``, with an extra input for each :class:`AddExtraInput`."""
        operations = self._operations()
        wanted = sum([operation.takes_extra_input for operation in operations])
        if len(extra_inputs) != wanted:
            raise OperandError(
                f"{self.label}: got {len(extra_inputs)} extra inputs for {wanted} AddExtraInput."
            )
        for index, residual in enumerate(extra_inputs):
            check_kind(self.label, f"extra input {index}", residual)
            if residual.device != input.device:
                raise OperandError(
                    f"{self.label}: extra input {index} is on {residual.device}, the input on "
                    f"{input.device}. Move one of them; nothing is moved silently."
                )
        extra = iter(extra_inputs)
        params: list[torch.Tensor] = []
        for operation in operations:
            params += [next(extra)] if operation.takes_extra_input else operation.link_params()
        first, width = next(self.parameters(), None), input_columns_of(self.link_shapes())
        return run_layer(self, input, params, like=first, columns=width)[0]

    def _describe(self) -> list[str]:
        return []


_uniform: InitMethod = partial(torch.nn.init.kaiming_uniform_, a=5**0.5)  # +-1 / sqrt(in_features)


class Linear(LinearLayer):
    """:class:`fp8core.Linear` as an operation, with the arguments and initial values of Transformer
    Engine's: weights start as those of ``torch.nn.Linear``, biases as zeros.

    Args:
        in_features, out_features, bias, device: as for ``fp8core.Linear``.
        dtype: of the parameters, torch's default if None; ``params_dtype`` is another name for it.
        accumulate_into_main_grad: ``fuse_wgrad_accumulation`` of ``fp8core.Linear``.
        init_method, parameters_split, name: as for ``fp8core.Linear``.

    The other arguments belong to tensor parallelism, which is not offered.
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
        rng_state_tracker_function: object | None = None,
        accumulate_into_main_grad: bool = False,
        init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        parameters_split: Sequence[str] | Mapping[str, int] | None = None,
        name: str | None = None,
    ) -> None:
        refuse_arguments(Linear.__init__, locals(), _PARALLEL, owner="ops.Linear")
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
        )


_PARALLEL = (
    *("tensor_parallel_mode", "tensor_parallel_group", "sequence_parallel"),
    "rng_state_tracker_function",
)


class Bias(Operation):
    """``x + bias``, with one value for each column."""

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
        names = ("tensor_parallel", "tensor_parallel_group")
        refuse_arguments(Bias.__init__, locals(), names, owner="ops.Bias")
        self.size = check_size("ops.Bias", "size", size)
        target = resolve_device(device)
        self.register_parameter("bias", make_parameter(size, device=target, dtype=dtype))
        if target.type != "meta":
            self.reset_parameters()

    def _fill_parameters(self) -> None:
        fill(self.bias, torch.nn.init.zeros_)

    def link_shapes(self) -> tuple[LinkShape, ...]:
        """Return the bias's shape."""
        return (BiasShape(self.size, self.bias.dtype),)

    def link_params(self) -> list[torch.Tensor]:
        """Return the bias."""
        return [self.bias]


class Dropout(Operation):
    """Zeroes elements with probability ``p`` in training and scales the rest by ``1 / (1 - p)``.

    The mask comes from a seed drawn in forward, so nothing is saved and a recompute repeats it.
    """

    def __init__(self, p: float) -> None:
        super().__init__(None)
        if not 0 <= p < 1:
            raise OperandError(f"ops.Dropout(p={p!r}): expected 0 <= p < 1.")
        self.p = p

    def link_shapes(self) -> tuple[LinkShape, ...]:
        """Return the dropout's shape, whose probability is 0 in evaluation."""
        return (DropoutShape(self.p if self.training else 0.0),)


class AddExtraInput(Operation):
    """The residual add: adds the next extra input of :class:`Sequential`."""

    takes_extra_input = True

    def link_shapes(self) -> tuple[LinkShape, ...]:
        """Return the add's shape."""
        return (AddShape(),)

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__(None)
        refuse_arguments(AddExtraInput.__init__, locals(), ("in_place",), owner="ops.AddExtraInput")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Raise, as only a :class:`Sequential` has an extra input to add."""
        raise OperandError(
            "ops.AddExtraInput cannot be called alone: put it into an ops.Sequential, whose call "
            "takes the extra input."
        )


class Quantize(Operation):
    """Rounds values, gradients or both to the recipe's format and back.

    Scales follow from the amaxes of the values, and rounding is to the nearest, also if the
    GEMMs of the recipe take delayed scales or round stochastically.
    """

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__(None)
        self._shape = QuantizeShape(forward, backward)

    def link_shapes(self) -> tuple[LinkShape, ...]:
        """Return the shape, which says whether values, gradients or both are rounded."""
        return (self._shape,)


def __dir__() -> list[str]:
    """Return the public names."""
    return sorted(__all__)


if not TYPE_CHECKING:  # to a type checker, it would make every name an attribute

    def __getattr__(name: str) -> NoReturn:
        """Raise AttributeError, which names the alternative to a name of Transformer Engine."""
        text = refusal(f"ops.{name}") or f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(text)
