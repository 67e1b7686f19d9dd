"""The base of operations that users write: forward and backward in torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fp8core.errors import OperandError
from fp8core.modules.extra_tensors import ExtraTensors

__all__ = ["BasicOperation", "OperationContext"]


class OperationContext:
    """What one forward of an operation keeps for its backward.

    Tensors go through :meth:`save_for_backward`, so that checkpointing and offloading see them;
    other values may be set as attributes. ``requires_grad`` says whether there will be a backward.
    """

    def __init__(self, requires_grad: bool) -> None:
        self.requires_grad = requires_grad
        self.to_save: Sequence[torch.Tensor | None] = ()
        self.saved_tensors: Sequence[torch.Tensor | None] = ()

    def save_for_backward(self, *tensors: torch.Tensor | None) -> None:
        """Keep ``tensors``, which backward finds in ``saved_tensors``."""
        self.to_save = tensors


class BasicOperation(torch.nn.Module, ExtraTensors):
    """An operation of one's own, for ``ops.Sequential`` or to be called.

    A subclass writes both directions in torch. Neither is traced by autograd::

        class Shift(ops.BasicOperation):
            def __init__(self, size):
                super().__init__()
                self.by = torch.nn.Parameter(torch.zeros(size))

            def op_forward(self, ctx, input_, **quantizers):
                return input_ + self.by

            def op_backward(self, ctx, grad_output):
                return grad_output, [grad_output.flatten(0, -2).sum(0)]

    The tensors have the shape and dtype in which they arrive: in a Sequential the chains before and
    after it end and begin there. With ``num_extra_inputs`` or ``num_extra_outputs`` a subclass
    overrides :meth:`fuser_forward` and :meth:`fuser_backward` instead.
    """

    def op_forward(
        self,
        ctx: OperationContext,
        input_: torch.Tensor,
        *,
        prev_op_grad_output_quantizer: None = None,
        next_op_input_quantizer: None = None,
    ) -> torch.Tensor:
        """Return the output. The quantizers are None: the neighbours cast themselves."""
        raise NotImplementedError(f"{type(self).__name__} has no op_forward")

    def op_backward(
        self, ctx: OperationContext, grad_output: torch.Tensor
    ) -> tuple[torch.Tensor | None, Iterable[torch.Tensor | None]]:
        """Return the gradient of the input, and those of the parameters in the order of
        ``parameters()``."""
        raise NotImplementedError(f"{type(self).__name__} has no op_backward")

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: None,
        next_op_input_quantizer: None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> tuple[torch.Tensor, Sequence[Sequence[torch.Tensor]]]:
        """Return the output and ``[extra outputs]``; each list has one entry, this operation's."""
        output = self.op_forward(
            basic_op_ctxs[0],
            input_,
            prev_op_grad_output_quantizer=prev_op_grad_output_quantizer,
            next_op_input_quantizer=next_op_input_quantizer,
            **basic_op_kwargs[0],
        )
        return output, [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor | None, ...]],
    ) -> tuple[
        torch.Tensor | None,
        Sequence[Iterable[torch.Tensor | None]],
        Sequence[Iterable[torch.Tensor | None]],
    ]:
        """Return the gradients of the input, ``[those of the parameters]`` and ``[those of the
        extra inputs]``."""
        grad_input, grad_params = self.op_backward(basic_op_ctxs[0], grad_output)
        return grad_input, [grad_params], [()]

    def forward(self, input: torch.Tensor, *extra_inputs: torch.Tensor, **kwargs: Any) -> Any:
        """Return the output, followed by the extra outputs if there are any.

        ``kwargs`` go to :meth:`op_forward`.

        Raises:
            OperandError: the number of extra inputs, of outputs or of gradients is wrong.
        """
        if len(extra_inputs) != self.num_extra_inputs:
            raise OperandError(
                f"{type(self).__name__}: got {len(extra_inputs)} extra inputs; expected "
                f"{self.num_extra_inputs}."
            )
        tensors = (input, *extra_inputs, *self.parameters())
        needs_grad = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
        outputs = _Node.apply(self, needs_grad, kwargs, *tensors)  # type: ignore[no-untyped-call]  # torch's
        return outputs[0] if len(outputs) == 1 else outputs


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        operation: BasicOperation,
        needs_grad: bool,
        kwargs: dict[str, Any],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        count = 1 + operation.num_extra_inputs
        own = OperationContext(needs_grad)
        output, (extra_outputs,) = operation.fuser_forward(
            [own],
            tensors[0],
            basic_op_extra_inputs=[tensors[1:count]],
            prev_op_grad_output_quantizer=None,
            next_op_input_quantizer=None,
            basic_op_kwargs=[kwargs],
        )
        if len(extra_outputs) != operation.num_extra_outputs:
            raise OperandError(
                f"{type(operation).__name__}.fuser_forward returned {len(extra_outputs)} extra "
                f"outputs; num_extra_outputs is {operation.num_extra_outputs}."
            )
        ctx.operation, ctx.own, ctx.num_params = operation, own, len(tensors) - count
        ctx.save_for_backward(*own.to_save)
        own.to_save = ()
        # An output that is an input would be taken for a view of it, written in place.
        return tuple(_apart(one, tensors) for one in (output, *extra_outputs))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        operation, own = ctx.operation, ctx.own
        own.saved_tensors = ctx.saved_tensors
        grad_input, (grad_params,), (grad_extras,) = operation.fuser_backward(
            [own], grads[0], basic_op_grad_extra_outputs=[tuple(grads[1:])]
        )
        own.saved_tensors = ()
        given, extras = tuple(grad_params), tuple(grad_extras)
        for name, returned, due in (
            ("parameters", given, ctx.num_params),
            ("extra inputs", extras, operation.num_extra_inputs),
        ):
            if len(returned) != due:
                raise OperandError(
                    f"{type(operation).__name__}: backward returned {len(returned)} gradients of "
                    f"{name}; it has {due}. Return one for each, None where none is needed."
                )
        return None, None, None, grad_input, *extras, *given


def _apart(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    return output.view_as(output) if any(output is one for one in inputs) else output
