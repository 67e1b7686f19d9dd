"""Layers of one operation: the base class, and operations that reshape, move, scale, add and drop
tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar, NamedTuple, TypeVar

import torch
from typing_extensions import override

from fp8core.chain.moving import MovingShape
from fp8core.chain.residual import AddShape
from fp8core.chain.shape import LinkShape, input_columns_of
from fp8core.chain.simple import L2NormShape, OutputShape, ScaleShape
from fp8core.collectives import named
from fp8core.errors import OperandError
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.inputs import cast_to_weight, check_kind
from fp8core.modules.calls.parameters import check_probability
from fp8core.modules.layers.parallel import communicator_of
from fp8core.modules.run import run_layer
from fp8core.torch_ops.capture import is_captured

_Self = TypeVar("_Self", bound="ExtraTensors")


class ExtraTensors:
    """The tensors that an operation takes besides its input, and returns besides its output.

    In an ``ops.Sequential`` extra inputs are arguments of the Sequential's call, in the order of
    the operations, and extra outputs follow the Sequential's output. A channel instead passes an
    extra output of an operation to later operations as an extra input.
    """

    num_extra_inputs: ClassVar[int] = 0
    num_extra_outputs: ClassVar[int] = 0

    _input_channels: dict[int, str] | None = None
    _output_channels: dict[int, tuple[str, bool]] | None = None

    def set_extra_input_channel(self: _Self, index: int, channel: str | None) -> _Self:
        """Take the extra input ``index`` from ``channel``, or with None from the call again.

        Raises:
            OperandError: there is no such extra input, or the channel is no name.
        """
        _check(self, "input", index, self.num_extra_inputs, channel)
        channels = dict(self._input_channels or {})
        channels.pop(index, None)
        if channel is not None:
            channels[index] = channel
        self._input_channels = channels
        return self

    def set_extra_output_channel(
        self: _Self, index: int, channel: str | None, *, output_to_caller: bool = True
    ) -> _Self:
        """Put the extra output ``index`` into ``channel`` for later operations; None removes it.

        With ``output_to_caller=False`` the call does not return the extra output.

        Raises:
            OperandError: there is no such extra output, or the channel is no name.
        """
        _check(self, "output", index, self.num_extra_outputs, channel)
        channels = dict(self._output_channels or {})
        channels.pop(index, None)
        if channel is not None:
            channels[index] = (channel, output_to_caller)
        self._output_channels = channels
        return self

    @property
    def input_channels(self) -> list[str | None]:
        """The channel of each extra input; None for an argument of the call."""
        channels = self._input_channels or {}
        return [channels.get(index) for index in range(self.num_extra_inputs)]

    def wires(self) -> list[bool]:
        """Return of each extra input whether the operation itself computes what its channel would
        bring, so that the input is None."""
        return [False] * self.num_extra_inputs

    @property
    def output_channels(self) -> list[tuple[str | None, bool]]:
        """For each extra output the channel or None, and whether the call returns the output."""
        channels = self._output_channels or {}
        return [channels.get(index, (None, True)) for index in range(self.num_extra_outputs)]


def _check(owner: object, way: str, index: int, count: int, channel: str | None) -> None:
    name = type(owner).__name__
    if not 0 <= index < count:
        raise OperandError(f"{name}: extra {way} {index} of {count}.")
    if channel is not None and (not isinstance(channel, str) or not channel):
        raise OperandError(f"{name}: channel {channel!r}; expected a name or None.")


class Operation(LowPrecisionModule, ExtraTensors):
    """A single operation; outside of a Sequential, a chain of one link.

    The operation casts the input to the dtype of its parameters and computes in that dtype; without
    parameters, in the dtype of the input.
    """

    kind = "operation"

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor) -> torch.Tensor:
        """Compute from ``input [..., k]``, and from as many extra inputs as the operation takes.

        Raises:
            OperandError: there are more or fewer extra inputs, or an input does not fit.
        """
        if len(extra_inputs) != self.num_extra_inputs:
            raise OperandError(
                f"{self.label}: got {len(extra_inputs)} extra inputs; expected "
                f"{self.num_extra_inputs}."
            )
        for tensor in extra_inputs:
            check_kind(self.label, "the extra input", tensor)
        params = list(extra_inputs) or self.link_params()
        like = None if extra_inputs or not params else params[0]
        shapes = self.link_shapes()
        if not shapes:
            check_kind(self.label, "input", input)
            return input
        columns = input_columns_of(shapes)
        converted = cast_to_weight(input, like)
        return run_layer(self, converted, columns=columns, params=params, like=like)[0]

    def _describe(self) -> list[str]:
        return []


class _Collective(Operation):
    """The base of operations over the ranks of ``process_group``, the default group if None."""

    _kind: ClassVar[str]

    def __init__(self, process_group: object | None = None) -> None:
        super().__init__(None)
        argument = f"ops.{type(self).__name__}(process_group={process_group!r})"
        communicator = communicator_of(argument, process_group)
        self._group = communicator.group_name
        self.process_group_size = communicator.size

    def link_shapes(self) -> tuple[LinkShape, ...]:
        """Return the shape of the collective; none for a group of one rank."""
        return (MovingShape(self._kind, self._group),) if self.process_group_size > 1 else ()

    def _describe(self) -> list[str]:
        return [f"process_group_size={self.process_group_size}"]


class AllGather(_Collective):
    """Concatenates the rows of all ranks along the first dimension.

    For a linear that follows, each rank casts its rows by the linear's recipe, and codes and scales
    are gathered. Backward sums the gradient over the ranks, and each rank gets its own rows.
    """

    _kind = "gather"


class ReduceScatter(_Collective):
    """Sums over the ranks; each rank gets its part of the first dimension.

    Backward concatenates the gradients of all ranks: as codes and scales for a linear before.
    """

    _kind = "scatter"


class AllReduce(_Collective):
    """Sums over the ranks.

    All ranks have to use the result in the same way: their gradients are equal then, and backward
    passes the gradient on unchanged. ``reduce_in_backward`` is accepted for compatibility, and
    changes nothing.
    """

    _kind = "all_reduce"

    def __init__(
        self, process_group: object | None = None, reduce_in_backward: bool = True
    ) -> None:
        super().__init__(process_group)


class Identity(Operation):
    """Returns its input."""

    def link_shapes(self) -> tuple[LinkShape, ...]:
        """Return no shape, as an identity is no link."""
        return ()


class ConstantScale(Operation):
    """``scale * x``, in the dtype of ``x``."""

    shape_fields = ("scale",)

    def __init__(self, scale: float) -> None:
        super().__init__(None)
        if isinstance(scale, bool) or not isinstance(scale, int | float):
            raise OperandError(f"ops.ConstantScale(scale={scale!r}): expected a number.")
        self.scale = float(scale)

    @override
    def link_shapes(self) -> tuple[LinkShape, ...]:
        return (ScaleShape(self.scale),)

    def _describe(self) -> list[str]:
        return [f"scale={self.scale}"]


class L2Normalization(Operation):
    """``x / sqrt(sum(x^2) + eps)`` over the last dimension, in float32.

    ``seq_length`` and ``micro_batch_size`` are accepted for compatibility.
    """

    shape_fields = ("eps",)

    def __init__(
        self,
        *,
        eps: float = 1e-6,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
    ) -> None:
        super().__init__(None)
        if not isinstance(eps, int | float) or not math.isfinite(eps) or eps < 0:
            raise OperandError(f"ops.L2Normalization(eps={eps!r}): expected a number >= 0.")
        self.eps = float(eps)

    @override
    def link_shapes(self) -> tuple[LinkShape, ...]:
        return (L2NormShape(self.eps),)

    def _describe(self) -> list[str]:
        return [f"eps={self.eps}"]


class AddExtraInput(Operation):
    """The residual add: adds an extra input, which in a Sequential is the next extra input of the
    Sequential's call.

    With ``in_place`` the sum is written to the extra input, and that tensor is the result. torch
    refuses such a write to a leaf that requires a gradient, and notices a write to a tensor that
    another operation has saved.
    """

    num_extra_inputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__(None)
        self.in_place = in_place

    @property
    def is_link(self) -> bool:
        """Whether the operation can be part of a chain, as a chain writes to none of its inputs."""
        return not self.in_place

    @override
    def link_shapes(self) -> tuple[LinkShape, ...]:
        return (AddShape(),)

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor) -> torch.Tensor:
        """Return ``input`` plus the extra input.

        Raises:
            OperandError: there is no extra input or more than one, or its shape differs; in place,
                the extra input is a leaf that requires a gradient.
        """
        if not self.in_place or len(extra_inputs) != 1:
            return super().forward(input, *extra_inputs)
        (extra,) = extra_inputs
        check_kind(self.label, "the extra input", extra)
        if extra.shape != input.shape:
            raise OperandError(
                f"{self.label}: the extra input is {list(extra.shape)}; expected the input's "
                f"{list(input.shape)}."
            )
        if torch.is_grad_enabled() and extra.requires_grad and extra.is_leaf:
            raise OperandError(
                f"{self.label}: in_place=True would write to a leaf that requires a gradient. Give "
                f"the result of an operation, or leave in_place out."
            )
        return extra.add_(input)


class MakeExtraOutput(Operation):
    """Returns its input as an extra output too: for a residual around the operations that follow.

    Backward adds the gradients of output and extra output in the input's dtype, each rounded
    before the sum. A :class:`~fp8core.RMSNorm` that follows in a Sequential adds the extra
    output's gradient to its own in float32, and rounds the sum alone, unless ``in_place`` is set.
    ``in_place`` lets Transformer Engine add in the memory of a gradient; torch decides that itself.
    """

    num_extra_outputs = 1

    def __init__(self, *, in_place: bool = False) -> None:
        super().__init__(None)
        self.in_place = in_place

    @property
    def is_link(self) -> bool:
        """Whether the operation begins a chain whose first link adds the gradients."""
        return not self.in_place

    def link_shapes(self) -> tuple[LinkShape, ...]:
        """Return the shape of the place at which the extra output leaves the chain."""
        return (OutputShape(),)

    def forward(  # type: ignore[override]  # the extra output
        self, input: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the input twice."""
        return input, input


class Reshape(torch.nn.Module):
    """``x.reshape(shape)``; one size may be -1."""

    def __init__(self, shape: Iterable[int]) -> None:
        super().__init__()
        sizes = tuple(shape)
        is_valid = all(isinstance(size, int) and size >= -1 for size in sizes)
        if not is_valid or sizes.count(-1) > 1:
            raise OperandError(
                f"ops.Reshape({sizes!r}): expected sizes >= 0, of which one may be -1."
            )
        self.shape = sizes

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return ``input`` with the shape of the operation.

        Raises:
            OperandError: ``input`` has another number of elements.
        """
        product = math.prod([size for size in self.shape if size != -1])
        count = input.numel()
        fits = count == product if -1 not in self.shape else product and not count % product
        if not fits:
            raise OperandError(
                f"ops.Reshape: input {list(input.shape)} has no shape {list(self.shape)}."
            )
        return input.reshape(self.shape)

    def extra_repr(self) -> str:
        """Return the shape."""
        return ", ".join(map(str, self.shape))


_BATCH_DIM = {"sbhd": 1, "bshd": 0}


class SampleSplit(NamedTuple):
    """How ranks share the tokens of samples.

    ``groups`` are the names of the groups whose ranks have tokens of the same samples. In thd the
    rank's context-parallel share is one ``parts``-th of each sample, one sample after the other; of
    the rows of that share, in blocks of equal size, the rank has block ``at``.
    """

    groups: tuple[str, ...] = ()
    parts: int = 1
    at: int = 0


_WHOLE = SampleSplit()


class DropPath(torch.nn.Module):
    """Stochastic depth: in training a sample's branch is zero with probability ``rate``, and is
    multiplied by ``1 / (1 - rate)`` otherwise. The choice is drawn from torch's generator, for a
    sample that ranks share from the generator of the first of these ranks.

    Args:
        rate: the probability.
        layout: ``"sbhd"``, ``"bshd"`` or ``"thd"``: which dimension holds the samples.

    Source: Huang et al. 2016, Deep Networks with Stochastic Depth, sec. 3.
    """

    def __init__(self, rate: float, layout: str) -> None:
        super().__init__()
        self.rate = check_probability("DropPath", "rate", rate)
        self.layout = layout

    def forward(
        self,
        branch: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        split: SampleSplit = _WHOLE,
    ) -> torch.Tensor:
        """Drop samples of ``branch``: ``[s, b, n]``, ``[b, s, n]`` or, in thd, ``[t, n]``, where
        ``cu_seqlens [b + 1]`` are the offsets of the samples' tokens, before ranks split them.

        Raises:
            OperandError: thd without ``cu_seqlens``; or, on every rank, different numbers of
                samples on ranks that share samples.
        """
        if not self.rate or not self.training:
            return branch
        keep_rate = (
            1 - self.rate or 1
        )  # division by 0 would give the dropped samples a gradient of NaN
        return torch.where(self._keep_mask(branch, cu_seqlens, split), branch / keep_rate, 0)

    def _keep_mask(
        self, branch: torch.Tensor, cu_seqlens: torch.Tensor | None, split: SampleSplit
    ) -> torch.Tensor:
        if self.layout in _BATCH_DIM:
            dim = _BATCH_DIM[self.layout]
            sizes = [1] * branch.dim()
            sizes[dim] = branch.shape[dim]
            return self._draw(branch.shape[dim], branch.device, split).view(sizes)
        if cu_seqlens is None:
            raise OperandError(
                f"DropPath(layout={self.layout!r}) drops whole sequences; cu_seqlens_q says where "
                f"they begin, and it is None."
            )
        num_samples, rows = cu_seqlens.numel() - 1, branch.shape[0]
        mask = self._draw(num_samples, branch.device, split)
        tokens = torch.arange(split.at * rows, (split.at + 1) * rows, device=branch.device)
        ends = cu_seqlens.to(branch.device)[1:] // split.parts
        sample = torch.bucketize(tokens, ends, right=True)
        return mask[sample.clamp(max=num_samples - 1)].unsqueeze(-1)

    def _draw(self, num_samples: int, device: torch.device, split: SampleSplit) -> torch.Tensor:
        """Return a mask of the samples to keep, the same on all ranks that share the samples."""
        drawn = torch.rand(num_samples, device=device)
        for group in split.groups:
            communicator = named(group)
            if not (drawn.is_meta or is_captured(drawn)):
                communicator.agree_once(f"{num_samples} samples", "samples to drop")
            drawn = communicator.gather(drawn, "dropped samples").wait()[:num_samples]
        return drawn >= self.rate

    def extra_repr(self) -> str:
        """Return the rate."""
        return f"rate={self.rate}"
