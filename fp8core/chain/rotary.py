"""Rotary position embedding as a link."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fp8core.backend_api import RotaryDesc
from fp8core.chain.call import Call
from fp8core.chain.link_defaults import LinkDefaults
from fp8core.chain.protocol import Backward, Forward, Out, Params, Saved, TensorProgram
from fp8core.chain.shape import BindContext, LinkShape

__all__ = ["RotaryLink", "RotaryShape"]


@dataclass(frozen=True, slots=True)
class RotaryShape(LinkShape):
    """Rotates heads. The rows are tokens in the order of ``layout``, one of
    :data:`fp8core.backend_api.ATTENTION_LAYOUTS`; ``interleaved`` is as in :class:`RotaryDesc`."""

    layout: str
    interleaved: bool = False

    @property
    def num_params(self) -> int:
        """The angles, which have no gradient."""
        return 1

    def bind(self, context: BindContext) -> RotaryLink:
        """Return the link."""
        desc = RotaryDesc(context.dtype, self.layout, self.interleaved)
        inverse = dataclasses.replace(desc, inverse=True)
        return RotaryLink(
            self,
            context.resolve("rotary", desc).run,
            context.resolve("rotary backward", inverse).run,
        )


@dataclass(frozen=True, slots=True, eq=False)
class RotaryLink(LinkDefaults):
    """``y [tokens, heads * head_dim]`` from x likewise.

    ``call.sizes`` are the sizes of the layout's dimensions, ``call.tensors`` the first positions of
    the sequences and where these lie among the tokens, either of them None as the operation has it.
    """

    shape: RotaryShape
    run: Callable[..., Any]
    run_backward: Callable[..., Any]
    num_params: int = 1

    def in_torch(self, bind: Callable[[Any], Any]) -> RotaryLink:
        """Return the rotation by torch's operators."""
        link: RotaryLink = bind(self.shape)
        return link

    def program(self, rows: int, needs_grad: Sequence[bool], call: Call) -> RotaryProgram:
        """Return the program, which is the same for any number of rows."""
        return RotaryProgram(self, needs_grad)

    def rotated(
        self,
        x: torch.Tensor,
        freqs: torch.Tensor,
        starts: torch.Tensor | None,
        cu_seqlens: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return ``x`` rotated, of the sizes of the layout."""
        y: torch.Tensor = _run(self.run, x, freqs, starts, cu_seqlens)
        return y


class RotaryProgram(TensorProgram[RotaryLink]):
    """Rotates; saves the angles and the positions."""

    __slots__ = ()

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Rotate."""
        given = (*params, *call.tensors)
        y: Any = _rotate(self._link.run, x, given, call)
        return y if out is None else out(y), given if self._needs_grad[0] else (), None

    def backward(
        self, grad: Any, saved: Saved, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Apply the transposed map."""
        if not self._needs_grad[0]:
            return None, None
        grad_x: Any = _rotate(self._link.run_backward, grad, saved, call)
        return grad_x if out is None else out(grad_x), None


def _rotate(run: Callable[..., Any], x: torch.Tensor, given: Saved, call: Call) -> torch.Tensor:
    y: torch.Tensor = _run(run, x.reshape(call.sizes), *given)
    return y.reshape(x.shape)


def _run(
    run: Callable[..., Any],
    x: torch.Tensor,
    freqs: torch.Tensor | None,
    starts: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
) -> Any:
    keywords = {}
    if starts is not None:
        keywords["start_positions"] = starts
    if cu_seqlens is not None:
        keywords["cu_seqlens"] = cu_seqlens
    return run(x, freqs, **keywords)
