"""Tensors that share the gradient of a parameter, for optimizers, GradScalers and clippers.

A master stores no gradient. ``master.grad`` is ``parameter.grad``, which the first access through
the master converts to float32. Both share one tensor, so that clipping, unscaling or zeroing the
gradient of either acts on both, and there is no second copy.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.optim import optimizer as torch_optimizer

from fp8core.errors import OperandError, UnsupportedError
from fp8core.torch_ops.capture import untraced
from fp8core.torch_ops.private import foreach_types, no_torch_function

MAKE = "Make it of masters.parameters(), not of model.parameters(), and attach it."


@dataclass(eq=False)
class Stepping:
    """The optimizers that may step the masters of a model, and the state of a step.

    Attributes:
        owners: the names of parameters with a master, by the parameters' ids.
        attached: the optimizers that write back after a step.
        is_collected: whether ``collect_grads()`` began a step that ``write_back()`` has not ended.
        stepped: the ids of masters that an unattached optimizer stepped and that are not written
            back yet.
        depth: how many steps are running, as one may call the step of its base class, or of another
            optimizer.
    """

    owners: dict[int, str] = field(default_factory=dict)
    attached: weakref.WeakSet[torch.optim.Optimizer] = field(default_factory=weakref.WeakSet)
    is_collected: bool = False
    stepped: set[int] = field(default_factory=set)
    depth: int = 0

    def __post_init__(self) -> None:
        _unused.add(self)

    def use(self) -> None:
        """Note that an optimizer steps the masters: others may step parameters without a master."""
        _unused.discard(self)


_unused: weakref.WeakSet[Stepping] = weakref.WeakSet()


class SharedGrad:
    """The behaviour that :func:`share_grad` adds to a tensor's class."""

    _parameter: torch.Tensor
    _name: str
    _stepping: Stepping
    dtype: torch.dtype

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of the parameter, which this converts to the dtype of this tensor.

        A parameter with a ``main_grad`` has its gradient there. Then ``parameter.grad`` is added to
        it, unless ``grad_added_to_main_grad`` says that it is a placeholder for a gradient that was
        added already. With ``zero_out_wgrad`` the placeholder is zeros and may have received the
        gradient of another use, so it is added.

        Raises:
            OperandError: ``main_grad`` has another dtype.
        """
        parameter: Any = self._parameter
        grad: torch.Tensor | None = parameter.grad
        summed = summed_grad(parameter)
        if summed is not None:
            return self._summed(summed, grad)
        if grad is not None and grad.dtype != self.dtype:
            grad = grad.to(self.dtype)
            self.grad = grad
        return grad

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        parameter: Any = self._parameter
        summed = summed_grad(parameter)
        if summed is not None:
            parameter.grad = None
            if hasattr(parameter, "grad_added_to_main_grad"):
                parameter.grad_added_to_main_grad = False
            with torch.no_grad():
                summed.zero_() if value is None else summed.copy_(value)
            return
        if value is not None and value.dtype != parameter.dtype:
            parameter.grad_dtype = (
                None  # None: autograd adds the next gradient in the dtype of this one
            )
        parameter.grad = value

    def _summed(self, summed: torch.Tensor, grad: torch.Tensor | None) -> torch.Tensor:
        if summed.dtype != self.dtype:
            raise OperandError(
                f"main_grad of {self._name!r} is {summed.dtype}; MasterWeights steps with a "
                f"main_grad of {self.dtype}."
            )
        parameter: Any = self._parameter
        if grad is not None:
            is_dummy = getattr(parameter, "grad_added_to_main_grad", False)
            if not is_dummy or getattr(parameter, "zero_out_wgrad", False):
                with torch.no_grad():
                    summed += grad
            parameter.grad = None
        return summed

    def register_hook(self, hook: Any) -> NoReturn:
        """Refuse: autograd accumulates into the parameter."""
        self._refuse_hook("register_hook")

    def register_post_accumulate_grad_hook(self, hook: Any) -> NoReturn:
        """Refuse: autograd accumulates into the parameter."""
        self._refuse_hook("register_post_accumulate_grad_hook")

    def _refuse_hook(self, registration: str) -> NoReturn:
        raise UnsupportedError(
            f"{registration} on the master of {self._name!r} would never run: autograd "
            f"accumulates into the model's parameter. Register it there."
        )

    def __deepcopy__(self, memo: Any) -> NoReturn:
        self._refuse_copy()

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse_copy()

    def _refuse_copy(self) -> NoReturn:
        raise UnsupportedError(
            f"the master of {self._name!r} cannot be copied or pickled, nor an optimizer that "
            f"steps it: a copy would belong to no parameter. Copy or save masters.state_dict() and "
            f"optimizer.state_dict(), and load them into new ones."
        )


def share_grad(
    tensor: torch.Tensor, parameter: torch.Tensor, name: str, stepping: Stepping
) -> torch.Tensor:
    """Return ``tensor``, a leaf of the parameter's shape, with the gradient of ``parameter``."""
    tensor.__class__ = _sharing(type(tensor))
    shared: Any = tensor
    shared._parameter, shared._name, shared._stepping = parameter, name, stepping
    stepping.owners[id(parameter)] = name
    register: Any = torch.Tensor.register_post_accumulate_grad_hook  # the master's own refuses
    register(tensor, _refuse_graph)
    return tensor


def _refuse_graph(tensor: Any) -> None:
    hold_grad(tensor, None)
    raise UnsupportedError(
        f"backward() reached the master of {tensor._name!r}, whose gradient is its parameter's. "
        f"Compute with the model's parameter, or with master.detach()."
    )


def hold_grad(tensor: torch.Tensor, value: torch.Tensor | None) -> None:
    """Store ``value`` as the gradient that compiled optimizers read, which bypass the property."""
    plain: Any = torch.Tensor
    plain.grad.__set__(tensor, value)


@functools.cache
def _sharing(kind: type[torch.Tensor]) -> type[torch.Tensor]:
    """Return ``kind``, torch.Tensor or DTensor, with :class:`SharedGrad` mixed in."""
    body = {"__torch_function__": no_torch_function, "__module__": __name__}
    sharing: type[torch.Tensor] = type(f"Master{kind.__name__}", (SharedGrad, kind), body)
    # Optimizers step the exact types in this list all at once, and others one by one.
    if kind in foreach_types:
        foreach_types.append(sharing)
    return sharing


def summed_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """Return the ``main_grad`` that a framework gave to ``parameter``, None if there is none."""
    summed = getattr(parameter, "main_grad", None)
    return summed if isinstance(summed, torch.Tensor) else None


@functools.cache
def watch_optimizers() -> None:
    """Have every optimizer refuse steps after which parameters and masters would differ."""
    torch_optimizer.register_optimizer_step_pre_hook(_refuse_unattached)
    torch_optimizer.register_optimizer_step_post_hook(_leave)


def stepped_by(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors that ``optimizer`` steps."""
    for group in optimizer.param_groups:
        yield from group["params"]


def _stepped_by_hand(optimizer: torch.optim.Optimizer) -> Iterator[SharedGrad]:
    """Yield the masters that ``optimizer`` steps without being attached to them."""
    for tensor in stepped_by(optimizer):
        if isinstance(tensor, SharedGrad) and optimizer not in tensor._stepping.attached:
            yield tensor


@untraced
def _refuse_unattached(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
    _refuse_owners(optimizer)
    kind, masters = type(optimizer).__name__, list(_stepped_by_hand(optimizer))
    for master in masters:
        stepping = master._stepping
        if not stepping.is_collected and not stepping.depth:
            raise OperandError(
                f"{kind}.step() would step the master of {master._name!r}, and the parameter would "
                f"never move: {kind} is not attached. Call masters.attach(optimizer) once, or "
                f"masters.collect_grads() before each step and masters.write_back() after it."
            )
        if id(master) in stepping.stepped and not stepping.depth:
            raise OperandError(
                f"{kind}.step(): the master of {master._name!r} was stepped before, but not "
                f"written back to the parameter. Call masters.write_back() after each step."
            )
    for stepping in {master._stepping for master in masters}:
        stepping.depth += 1
    for master in masters:
        master._stepping.stepped.add(id(master))


def _refuse_owners(optimizer: torch.optim.Optimizer) -> None:
    """Refuse to step parameters whose masters no optimizer steps yet."""
    for stepping in tuple(_unused):
        for tensor in stepped_by(optimizer):
            if id(tensor) in stepping.owners:
                raise OperandError(
                    f"{type(optimizer).__name__}.step() would step the parameter "
                    f"{stepping.owners[id(tensor)]!r} itself, and nobody its master. {MAKE}"
                )


@untraced
def _leave(optimizer: torch.optim.Optimizer, _: Any, __: Any) -> None:
    for stepping in {master._stepping for master in _stepped_by_hand(optimizer)}:
        stepping.depth = max(0, stepping.depth - 1)
