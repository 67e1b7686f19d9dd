"""The base of operations that users write: forward and backward in torch."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch
from typing_extensions import override

from fp8core.chain.differentiable import gradients_once
from fp8core.errors import OperandError
from fp8core.modules.layers.operation import ExtraTensors

Fusion: TypeAlias = Callable[..., Iterable[torch.nn.Module]]
"""``f(operations, *, recipe)`` -> operations, some of them replaced by fused ones."""

Outputs: TypeAlias = tuple[torch.Tensor, Sequence[Sequence[torch.Tensor]]]
"""The output, and the extra outputs of each of the basic operations."""

Grads: TypeAlias = Iterable["torch.Tensor | None"]
Gradients: TypeAlias = "tuple[torch.Tensor | None, Sequence[Grads], Sequence[Grads]]"
"""Those of the input, and for each of the basic operations those of its parameters and those of its
extra inputs."""

_fusions: list[Fusion] = []
_forward_fusions: list[Fusion] = []
_backward_fusions: list[Fusion] = []


def register_forward_backward_fusion(func: Fusion, prepend: bool = False) -> None:
    """Have ``func(operations, *, recipe)`` replace operations of every ``ops.Sequential``.

    The fusion is called in each forward with the operations in order, and the recipe of the active
    autocast or None, and returns the operations to run: those that it was given, and each
    :class:`FusedOperation` in the place of its ``basic_ops``. ``prepend`` calls it before the
    functions that were registered earlier, instead of after them.
    """
    _register(_fusions, func, prepend)


def register_forward_fusion(func: Fusion, prepend: bool = False) -> None:
    """Have ``func(operations, *, recipe)`` replace operations in forward alone.

    As :func:`register_forward_backward_fusion`, after it. The fused forward leaves in the context
    of each operation what the backward of that operation reads. Operations that are not derived
    from :class:`FusibleOperation` have no context: OperandError in the first forward.
    """
    _register(_forward_fusions, func, prepend)


def register_backward_fusion(func: Fusion, prepend: bool = False) -> None:
    """Have ``func(operations, *, recipe)`` replace operations in backward alone.

    As :func:`register_forward_fusion`: the fused backward reads the contexts that the forwards of
    the operations, or of their forward fusion, have filled.
    """
    _register(_backward_fusions, func, prepend)


def _register(fusions: list[Fusion], func: Fusion, prepend: bool) -> None:
    if not callable(func):
        raise OperandError(f"fusion {func!r}: expected a function f(operations, *, recipe).")
    try:
        inspect.signature(func).bind([], recipe=None)
    except TypeError as error:
        raise OperandError(
            f"fusion {_fusion_name(func)}: expected a function f(operations, *, recipe); {error}."
        ) from None
    except ValueError:  # it tells no signature
        pass
    fusions.insert(0 if prepend else len(fusions), func)


def has_fusions() -> bool:
    """Return whether a fusion is registered."""
    return bool(_fusions or _forward_fusions or _backward_fusions)


def fused(operations: list[torch.nn.Module], recipe: Any) -> list[torch.nn.Module]:
    """Return ``operations`` with those replaced that a registered fusion replaces.

    Raises:
        OperandError: a fusion changed the order of the operations, or lost one; or fused one
            direction of an operation that has no context.
    """
    operations = _replaced(operations, _fusions, recipe)
    if not _forward_fusions and not _backward_fusions:
        return operations
    forward = _replaced(operations, _forward_fusions, recipe)[::-1]
    backward = _replaced(operations, _backward_fusions, recipe)[::-1]
    result = []
    while forward:  # the shortest runs that begin and end together in both directions
        first, last = [forward.pop()], [backward.pop()]
        while (ahead := _num_parts(first) - _num_parts(last)) != 0:
            (last if ahead > 0 else first).append((backward if ahead > 0 else forward).pop())
        result.append(first[0] if first[0] is last[0] else _FusedApart(first, last))
    return result


def _replaced(
    operations: list[torch.nn.Module], fusions: Sequence[Fusion], recipe: Any
) -> list[torch.nn.Module]:
    for fusion in fusions:
        returned = fusion(list(operations), recipe=recipe)
        changed = list(returned) if isinstance(returned, Iterable) else []
        parts = [parts_of(group) for group in changed]
        flat = [id(part) for group in parts for part in group]
        expected = [id(part) for group in operations for part in parts_of(group)]
        if flat != expected or not all(parts):
            raise OperandError(
                f"fusion {_fusion_name(fusion)}: it returned other operations than it was given, "
                f"or another order. Return a list of each, or a FusedOperation of one or more."
            )
        operations = changed
    return operations


def _fusion_name(fusion: Fusion) -> str:
    return getattr(fusion, "__name__", repr(fusion))


def parts_of(operation: torch.nn.Module) -> Sequence[torch.nn.Module]:
    """Return the operations that ``operation`` computes, itself if it is none of several."""
    return operation.basic_operations if isinstance(operation, FusedOperation) else [operation]


class OperationContext:
    """The tensors and values that a forward of an operation saves for its backward.

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


class FusibleOperation(torch.nn.Module, ExtraTensors):
    """The base of operations that users write, with which a fusion may replace others."""

    @property
    def basic_operations(self) -> Sequence[torch.nn.Module]:
        """The operations that are computed, this one or those that a fusion replaces."""
        return [self]

    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        prev_op_grad_output_quantizer: None,
        next_op_input_quantizer: None,
        basic_op_kwargs: list[dict[str, Any]],
    ) -> Outputs:
        """Return the output, and the extra outputs of each of the basic operations."""
        raise NotImplementedError(f"{type(self).__name__} has no fuser_forward")

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor | None, ...]],
    ) -> Gradients:
        """Return the gradients of the input, and for each of the basic operations those of its
        parameters and those of its extra inputs."""
        raise NotImplementedError(f"{type(self).__name__} has no fuser_backward")

    def forward(
        self, input: torch.Tensor, *extra_inputs: torch.Tensor | None, **kwargs: Any
    ) -> Any:
        """Return the output, followed by the extra outputs if there are any.

        ``kwargs`` go to the operation.

        Raises:
            OperandError: the number of extra inputs, of outputs or of gradients is wrong; or an
                operation that replaces others has a parameter that is none of theirs.
        """
        if len(extra_inputs) != self.num_extra_inputs:
            raise OperandError(
                f"{_name_of(self)}: got {len(extra_inputs)} extra inputs; expected "
                f"{self.num_extra_inputs}."
            )
        tensors = (input, *extra_inputs, *_params_of(self))
        needs_grad = torch.is_grad_enabled() and any(
            tensor is not None and tensor.requires_grad for tensor in tensors
        )
        outputs = _Node.apply(self, needs_grad, kwargs, *tensors)  # type: ignore[no-untyped-call]  # torch's
        return outputs[0] if len(outputs) == 1 else outputs


class BasicOperation(FusibleOperation):
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
        basic_op_kwargs: list[dict[str, Any]],
        **quantizers: None,
    ) -> Outputs:
        """Return the output and ``[extra outputs]``; each list has one entry, this operation's."""
        return self.op_forward(basic_op_ctxs[0], input_, **quantizers, **basic_op_kwargs[0]), [()]

    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: torch.Tensor,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor | None, ...]],
    ) -> Gradients:
        """Return the gradients of the input, ``[those of the parameters]`` and ``[those of the
        extra inputs]``."""
        grad_input, grad_params = self.op_backward(basic_op_ctxs[0], grad_output)
        return grad_input, [grad_params], [()]


class FusedOperation(FusibleOperation):
    """Several operations computed as one, in forward and in backward.

    A subclass overrides ``fuser_forward`` and ``fuser_backward``, whose lists have an entry
    for each of ``basic_ops``; :func:`register_forward_backward_fusion` puts it in their place.
    """

    def __init__(self, basic_ops: Iterable[torch.nn.Module]) -> None:
        super().__init__()
        self.basic_ops = torch.nn.ModuleList(basic_ops)

    @property
    @override
    def basic_operations(self) -> Sequence[torch.nn.Module]:
        return list(self.basic_ops)

    @property
    def num_extra_inputs(self) -> int:  # type: ignore[override]  # follows from the operations
        """How many extra inputs all of them take."""
        return sum(map(_num_inputs, self.basic_ops))

    @property
    def num_extra_outputs(self) -> int:  # type: ignore[override]  # likewise
        """How many extra outputs all of them return."""
        return sum(map(_num_outputs, self.basic_ops))

    @property
    @override
    def input_channels(self) -> list[str | None]:
        fusible = [operation for operation in self.basic_ops if isinstance(operation, ExtraTensors)]
        return [channel for operation in fusible for channel in operation.input_channels]

    @override
    def wires(self) -> list[bool]:
        filled: set[str | None] = set()
        wired = []
        for operation in self.basic_ops:
            if isinstance(operation, ExtraTensors):
                wired += [channel in filled for channel in operation.input_channels]
                filled |= {channel for channel, _ in operation.output_channels} - {None}
        return wired

    @property
    @override
    def output_channels(self) -> list[tuple[str | None, bool]]:
        fusible = [operation for operation in self.basic_ops if isinstance(operation, ExtraTensors)]
        return [channel for operation in fusible for channel in operation.output_channels]


class _FusedApart(FusedOperation):
    """Operations of which a fusion replaces one direction: each has a context for both."""

    def __init__(
        self, forwards: Sequence[torch.nn.Module], backwards: Sequence[torch.nn.Module]
    ) -> None:
        super().__init__([part for operation in forwards for part in parts_of(operation)])
        for operation in (*forwards, *backwards):
            if not isinstance(operation, FusibleOperation):
                raise OperandError(
                    f"a fusion of one direction: {type(operation).__name__} saves nothing that "
                    f"another's forward or backward could use. Fuse operations derived from "
                    f"ops.BasicOperation, or both directions by register_forward_backward_fusion."
                )
            _params_of(operation)  # refused here, where its name is the user's
        self._ways = [_with_parts(way) for way in (forwards, backwards)]

    @override
    def fuser_forward(
        self,
        basic_op_ctxs: list[OperationContext],
        input_: torch.Tensor,
        *,
        basic_op_extra_inputs: list[tuple[torch.Tensor, ...]],
        basic_op_kwargs: list[dict[str, Any]],
        **quantizers: None,
    ) -> Outputs:
        extras: list[Sequence[torch.Tensor]] = []
        for operation, part in self._ways[0]:
            input_, extra = operation.fuser_forward(
                basic_op_ctxs[part],
                input_,
                basic_op_extra_inputs=basic_op_extra_inputs[part],
                basic_op_kwargs=basic_op_kwargs[part],
                **quantizers,
            )
            extras += extra
        return input_, extras

    @override
    def fuser_backward(
        self,
        basic_op_ctxs: list[OperationContext],
        grad_output: Any,
        *,
        basic_op_grad_extra_outputs: list[tuple[torch.Tensor | None, ...]],
    ) -> Gradients:
        params: list[Grads] = []
        extras: list[Grads] = []
        for operation, part in reversed(self._ways[1]):
            grad_output, grads, extra = operation.fuser_backward(
                basic_op_ctxs[part],
                grad_output,
                basic_op_grad_extra_outputs=basic_op_grad_extra_outputs[part],
            )
            params, extras = [*grads, *params], [*extra, *extras]
        return grad_output, params, extras


def _name_of(operation: torch.nn.Module) -> str:
    """Return the class of ``operation``; those of its parts if it is fused in one direction."""
    parts = operation.basic_operations if isinstance(operation, _FusedApart) else [operation]
    return ", ".join([type(part).__name__ for part in parts])


def _params_of(operation: FusibleOperation) -> list[torch.nn.Parameter]:
    """Return the parameters of each of the basic operations: one that two of them share is there
    twice, as it gets a gradient of each."""
    params = [param for basic in operation.basic_operations for param in basic.parameters()]
    if not {*map(id, operation.parameters())} <= {*map(id, params)}:
        raise OperandError(
            f"{_name_of(operation)} has a parameter of its own, which would get no gradient: its "
            f"backward returns those of the operations that it replaces. Give it to one of them."
        )
    return params


def _num_parts(operations: Sequence[torch.nn.Module]) -> int:
    return sum(len(parts_of(operation)) for operation in operations)


def _with_parts(operations: Sequence[Any]) -> list[tuple[Any, slice]]:
    """Return each operation with the place of its parts among those of all."""
    ends = [*itertools.accumulate(len(parts_of(operation)) for operation in operations)]
    return [*zip(operations, map(slice, [0, *ends[:-1]], ends), strict=True)]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        operation: FusibleOperation,
        needs_grad: bool,
        kwargs: dict[str, Any],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        basic = operation.basic_operations
        contexts = [OperationContext(needs_grad) for _ in basic]
        left = iter(tensors[1:])
        output, extra_outputs = operation.fuser_forward(
            contexts,
            tensors[0],
            basic_op_extra_inputs=[tuple(itertools.islice(left, _num_inputs(b))) for b in basic],
            prev_op_grad_output_quantizer=None,
            next_op_input_quantizer=None,
            basic_op_kwargs=[kwargs, *({} for _ in basic[1:])],
        )
        flat = [tensor for extra in extra_outputs for tensor in extra]
        if len(flat) != operation.num_extra_outputs:
            raise OperandError(
                f"{_name_of(operation)}.fuser_forward returned {len(flat)} extra outputs; "
                f"num_extra_outputs is {operation.num_extra_outputs}."
            )
        for result in (output, *flat):
            if not isinstance(result, torch.Tensor):
                raise OperandError(
                    f"{_name_of(operation)}: forward returned {type(result).__name__}; "
                    f"expected a torch.Tensor."
                )
        ctx.operation, ctx.contexts = operation, contexts
        ctx.counts = [len(context.to_save) for context in contexts]
        ctx.save_for_backward(*[tensor for context in contexts for tensor in context.to_save])
        for context in contexts:
            context.to_save = ()
        # An output that is an input would be taken for a view of it, written in place.
        return tuple(_apart(result, tensors) for result in (output, *flat))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        return gradients_once(_Node.gradients, ctx, grads, _name_of(ctx.operation))

    @staticmethod
    def gradients(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        operation, contexts = ctx.operation, ctx.contexts
        basic, saved, left = operation.basic_operations, iter(ctx.saved_tensors), iter(grads[1:])
        for context, count in zip(contexts, ctx.counts, strict=True):
            context.saved_tensors = tuple(itertools.islice(saved, count))
        grad_input, grad_params, grad_extras = operation.fuser_backward(
            contexts,
            grads[0],
            basic_op_grad_extra_outputs=[
                tuple(itertools.islice(left, _num_outputs(b))) for b in basic
            ],
        )
        for context in contexts:
            context.saved_tensors = ()
        params = [len(list(operation.parameters())) for operation in basic]
        param_grads = _counted(operation, "parameters", grad_params, params)
        extras = _counted(operation, "extra inputs", grad_extras, [*map(_num_inputs, basic)])
        return None, None, None, grad_input, *extras, *param_grads


def _counted(
    operation: torch.nn.Module,
    name: str,
    returned: Iterable[Iterable[torch.Tensor | None]],
    due: Sequence[int],
) -> list[torch.Tensor | None]:
    """Return the gradients that backward ``returned``, checked to be ``due[i]`` of operation i."""
    each = [list(grads) for grads in returned]
    if [len(grads) for grads in each] != list(due):
        counts = ", ".join(str(len(grads)) for grads in each) or "0"
        raise OperandError(
            f"{_name_of(operation)}: backward returned {counts} gradients of {name}; it has "
            f"{', '.join(map(str, due))}. Return one for each, None where none is needed."
        )
    return [grad for grads in each for grad in grads]


def _num_inputs(operation: torch.nn.Module) -> int:
    return operation.num_extra_inputs if isinstance(operation, ExtraTensors) else 0


def _num_outputs(operation: torch.nn.Module) -> int:
    return operation.num_extra_outputs if isinstance(operation, ExtraTensors) else 0


def _apart(output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
    return output.view_as(output) if any(output is input for input in inputs) else output
