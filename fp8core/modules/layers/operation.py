"""A layer of one operation: the base of those in :mod:`fp8core.ops`."""

from __future__ import annotations

from typing import ClassVar, TypeVar

import torch

from fp8core.chain.shape import input_columns_of
from fp8core.errors import OperandError
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.inputs import cast_to_weight, check_kind
from fp8core.modules.run import run_layer

_Self = TypeVar("_Self", bound="ExtraTensors")


class ExtraTensors:
    """How many tensors an operation takes besides its input, and returns besides its output.

    In an ``ops.Sequential`` the extra inputs come from its call, in the order of the operations,
    and the extra outputs follow its output. A channel leads one from an operation to a later one
    instead.
    """

    num_extra_inputs: ClassVar[int] = 0
    num_extra_outputs: ClassVar[int] = 0

    _input_channels: dict[int, str] | None = None
    _output_channels: dict[int, tuple[str, bool]] | None = None

    def set_extra_input_channel(self: _Self, index: int, channel: str | None) -> _Self:
        """Have the extra input ``index`` come from ``channel`` instead of the call; None undoes it.

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
        """Have later operations find the extra output ``index`` in ``channel``; None undoes it.

        With ``output_to_caller=False`` the call does not return it.

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
        """The channel of each extra input; None for one that comes with the call."""
        channels = self._input_channels or {}
        return [channels.get(index) for index in range(self.num_extra_inputs)]

    @property
    def output_channels(self) -> list[tuple[str | None, bool]]:
        """The channel of each extra output, None for none, and whether the call returns it."""
        channels = self._output_channels or {}
        return [channels.get(index, (None, True)) for index in range(self.num_extra_outputs)]


def _check(owner: object, way: str, index: int, count: int, channel: str | None) -> None:
    name = type(owner).__name__
    if not 0 <= index < count:
        raise OperandError(f"{name}: extra {way} {index} of {count}.")
    if channel is not None and (not isinstance(channel, str) or not channel):
        raise OperandError(f"{name}: channel {channel!r}; expected a name or None.")


class Operation(LowPrecisionModule, ExtraTensors):
    """A single operation; called by itself, a chain of its own.

    The operation computes in the dtype of its parameters, to which the input is cast, and without
    parameters in that of the input.
    """

    kind = "operation"

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)

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
        return run_layer(self, cast_to_weight(input, like), params, like=like, columns=columns)[0]

    def _describe(self) -> list[str]:
        return []
