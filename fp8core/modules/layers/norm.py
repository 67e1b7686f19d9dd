"""LayerNorm and RMSNorm with zero-centered gamma."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import ClassVar

import torch
from typing_extensions import override

from fp8core.chain.norm import NormShape
from fp8core.chain.residual import AddShape
from fp8core.errors import OperandError, UnsupportedError
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.inputs import cast_to_weight, check_kind
from fp8core.modules.calls.parameters import check_size, fill, make_parameter, resolve_device
from fp8core.modules.run import run_layer

NORM_PARAMETERS = {"layernorm": ("weight", "bias"), "rmsnorm": ("weight",)}
"""The names of a norm's parameters, in order, by its kind."""


def norm_names(kind: str, prefix: str = "layer_norm_") -> list[str]:
    """Return the names in a layer of the parameters of a norm of ``kind``."""
    return list(map(f"{prefix}{{}}".format, NORM_PARAMETERS[kind]))


def register_norm(
    module: torch.nn.Module,
    names: Iterable[str],
    sizes: Sequence[int],
    device: torch.device,
    dtype: torch.dtype | None,
    *,
    sequence_parallel: bool | None,
) -> None:
    """Give ``module`` the parameters of a norm, marked for Megatron unless ``sequence_parallel`` is
    None."""
    for name in names:
        parameter = make_parameter(*sizes, device=device, dtype=dtype)
        module.register_parameter(name, parameter)
        if sequence_parallel is not None:
            mark_norm(parameter, sequence_parallel)


def reset_norm(module: torch.nn.Module, names: Iterable[str], *, zero_centered: bool) -> None:
    """Fill the parameters of a norm: gamma with 1 (0 if zero-centered), beta with 0."""
    first = torch.nn.init.zeros_ if zero_centered else torch.nn.init.ones_
    for name, method in zip(names, (first, torch.nn.init.zeros_), strict=False):
        fill(module._parameters.get(name), method)


def mark_norm(parameter: torch.Tensor | None, sequence_parallel: bool) -> None:
    """Set the attribute by which Megatron knows a parameter whose gradient it has to sum over
    ranks, as each sees some of the rows or heads."""
    if parameter is not None:
        vars(parameter).update(sequence_parallel=sequence_parallel)


class _Norm(LowPrecisionModule):
    kind = "norm"
    weight: torch.nn.Parameter
    norm_kind: ClassVar[str]
    # What a class of another library calls its eps.
    eps_name = "eps"

    def __init__(
        self,
        normalized_shape: int | Sequence[int] | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool | None = None,
        params_dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
        hidden_size: int | Sequence[int] | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        sm_margin: int = 0,
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        owner = type(self).__name__
        if sm_margin:
            raise UnsupportedError(f"{owner}(sm_margin={sm_margin!r}) is not offered.")
        shape = normalized_shape if normalized_shape is not None else hidden_size
        sizes = (shape,) if isinstance(shape, int) else tuple(shape or ())
        if not sizes:
            raise OperandError(
                f"{owner}(normalized_shape={shape!r}): expected the sizes of the last dimensions."
            )
        for size in sizes:
            check_size(owner, "normalized_shape", size)
        self.normalized_shape = sizes
        self.hidden_size = math.prod(sizes)
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        target = resolve_device(device)
        names, dtype = norm_names(self.norm_kind, ""), params_dtype or dtype
        register_norm(self, names, sizes, target, dtype, sequence_parallel=sequence_parallel)
        if target.type != "meta":
            self.reset_parameters()

    def _fill_parameters(self) -> None:
        names = norm_names(self.norm_kind, "")
        reset_norm(self, names, zero_centered=self.zero_centered_gamma)

    @property
    def shape_fields(self) -> tuple[str, ...]:  # type: ignore[override]  # a class's elsewhere
        """The names of eps and of the choice of the factor."""
        return self.eps_name, "zero_centered_gamma"

    @override
    def link_shapes(self) -> tuple[NormShape]:
        eps: float = getattr(self, self.eps_name)
        sizes = self.norm_kind, self.hidden_size, eps, self.zero_centered_gamma
        return (NormShape(*sizes, self.dtype_of("weight")),)

    @property
    def is_link(self) -> bool:
        """Whether it normalizes the last dimension alone, as the links of a chain do."""
        return len(self.normalized_shape) == 1

    @override
    def link_names(self) -> list[tuple[str, ...]] | None:
        return [*zip(NORM_PARAMETERS[self.norm_kind], strict=True)]

    def link_params(self) -> list[torch.Tensor]:
        """Return gamma, then beta if there is one, each in one dimension."""
        params = super().link_params()
        return params if self.is_link else [param.flatten() for param in params]

    def forward(self, input: torch.Tensor, *, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Normalize the last dimension of ``input [..., n]``, or its last dimensions, in float32.

        The result has the dtype of the parameters, to which the input is cast. With a ``residual``
        of the same shape and dtype their sum is normalized, rounded first; the backend adds and
        normalizes in one operation if it has one.

        Raises:
            OperandError: an input or a residual that does not fit.
        """
        if len(self.normalized_shape) > 1:
            return self._normalize_flat(input, residual)
        if residual is not None:
            return self._normalize_sum(input, residual)
        input = cast_to_weight(input, self.weight)
        return run_layer(self, input, columns=self.hidden_size)[0]

    def _normalize_flat(self, input: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        """Normalize the last dimensions as one."""
        check_kind(self.label, "input", input)
        count = len(self.normalized_shape)
        if tuple(input.shape[-count:]) != self.normalized_shape:
            raise OperandError(
                f"{self.label}: input {list(input.shape)}; the layer takes "
                f"[..., {', '.join(map(str, self.normalized_shape))}]."
            )
        flat = cast_to_weight(input, self.weight).flatten(-count)
        if residual is not None:
            output = self._normalize_sum(flat, residual.flatten(-count))
        else:
            columns, params, like = self.hidden_size, self.link_params(), self.weight
            output = run_layer(self, flat, columns=columns, params=params, like=like)[0]
        return output.view(input.shape)

    def _normalize_sum(self, input: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        check_kind(self.label, "residual", residual)
        if residual.shape != input.shape or residual.device != input.device:
            raise OperandError(
                f"{self.label}: residual {list(residual.shape)} on {residual.device}, input "
                f"{list(input.shape)} on {input.device}; expected the same shape and device."
            )
        shapes, params = (AddShape(), *self.link_shapes()), [residual, *self.link_params()]
        columns, like = self.hidden_size, self.weight
        return run_layer(self, input, columns=columns, shapes=shapes, params=params, like=like)[0]

    def _describe(self) -> list[str]:
        return [
            "x".join(map(str, self.normalized_shape)),
            f"eps={self.eps}",
            f"zero_centered={self.zero_centered_gamma}",
        ]


class LayerNorm(_Norm):
    """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last dimension, or several.

    Args:
        normalized_shape: the size of the last dimension, or the sizes of the last dimensions;
            ``hidden_size`` is its older name.
        eps: added to the variance.
        sequence_parallel: not offered.
        params_dtype: dtype of ``weight`` and ``bias``; ``dtype`` is another name for it.
        zero_centered_gamma: the factor is ``1 + weight``.
        device: of the parameters; None takes the selected backend's.
        sm_margin: multiprocessors to leave to other kernels, not offered.
        name: the layer's name in messages.
    """

    norm_kind = "layernorm"


class RMSNorm(_Norm):
    """``x / sqrt(mean square + eps) * weight`` over the last dimensions; arguments as LayerNorm."""

    norm_kind = "rmsnorm"
