"""Master copies: what an optimizer steps where parameters are too coarse to be stepped."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fp8core.errors import OperandError, UnsupportedError
from fp8core.parameter.tensor import QuantizedTensor

__all__ = ["MasterWeights"]


class MasterWeights:
    """Float32 copies of a model's low-precision parameters, for any optimizer to step.

    ::

        masters = fp8core.MasterWeights(model)
        optimizer = torch.optim.AdamW(masters.parameters())
        masters.attach(optimizer)
        ...
        loss.backward()
        optimizer.step()  # gradients go to the masters, the result back to the parameters

    Quantized, bfloat16 and float16 parameters that require gradients get a master; float32 ones
    are their own. A master starts as the initial value that
    ``quantized_model_init(preserve_high_precision_init_val=True)`` kept, which is then cleared,
    else as the parameter's value. Clip gradients on ``model.parameters()``, before the step. With
    ``torch.amp.GradScaler``, which looks for gradients on the masters, call ``collect_grads()``
    before ``scaler.unscale_(optimizer)``.

    Make it after the model is on its device and its checkpoint loaded; a checkpoint that continues
    bit for bit holds ``masters.state_dict()`` besides the model's and the optimizer's.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        named = model.named_parameters()
        self._parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        self._masters = {name: _master(own) for name, own in self._parameters.items()}
        self._versions = {name: parameter._version for name, parameter, _ in self._pairs()}

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield what the optimizer steps, one tensor a parameter, in the model's order."""
        yield from self._masters.values()

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the same with the parameters' names, to sort them into groups."""
        yield from self._masters.items()

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Have ``optimizer.step()`` collect the gradients first and write back last.

        Several optimizers may share the masters; each does so for those that it steps.

        Raises:
            OperandError: the optimizer was made for the parameters, or for other tensors.
            UnsupportedError: at the step, it was given a closure: its gradients come too late.
        """
        stepped = self._stepped_by(optimizer)
        own = {id(parameter) for _, parameter, _ in self._pairs()}
        if stepped & own or not stepped & {id(master) for master in self.parameters()}:
            raise OperandError(
                f"{type(optimizer).__name__} was made for other tensors than these masters. Make "
                f"it of masters.parameters(), not of model.parameters()."
            )

        def before(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if any(closure is not None for closure in (*args[1:2], kwargs.get("closure"))):
                raise UnsupportedError(
                    f"{type(optimizer).__name__}.step(closure) with MasterWeights is not offered: "
                    f"call backward() before step(), or do without attach(): in the closure, "
                    f"write_back(), forward, backward(), collect_grads()."
                )
            self._collect(self._stepped_by(optimizer))

        clear = optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:
            """Clear the parameters' gradients too: nobody has collected them yet."""
            clear(set_to_none)
            stepped = self._stepped_by(optimizer)
            for _, parameter, master in self._pairs():
                if id(master) in stepped:
                    parameter.grad = None

        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]  # there is no hook for it
        optimizer.register_step_pre_hook(before)
        optimizer.register_step_post_hook(lambda *_: self._write(self._stepped_by(optimizer)))

    def collect_grads(self) -> None:
        """Move the parameters' gradients to their masters, as float32.

        Raises:
            OperandError: a parameter was written by somebody else; the masters would undo that.
        """
        self._collect({id(master) for master in self.parameters()})

    def write_back(self) -> None:
        """Round the masters into the parameters."""
        self._write({id(master) for master in self.parameters()})

    def _collect(self, stepped: set[int]) -> None:
        for name, parameter, master in self._pairs():
            if id(master) not in stepped:
                continue
            if parameter._version != self._versions[name]:
                raise OperandError(
                    f"parameter {name!r} was written since its master was, and the step would undo "
                    f"that. Make a new MasterWeights, or load_state_dict() into this one."
                )
            grad = parameter.grad
            summed = getattr(parameter, "main_grad", None)
            if grad is None and isinstance(summed, torch.Tensor):  # fuse_wgrad_accumulation
                grad = summed
            if grad is not None:  # else what collect_grads() has brought stays
                master.grad = grad.to(master.dtype)
            parameter.grad = None

    @torch.no_grad()
    def _write(self, stepped: set[int]) -> None:
        for name, parameter, master in self._pairs():
            if id(master) in stepped:
                parameter.copy_(master)
                self._versions[name] = parameter._version
                master.grad = None

    def _stepped_by(self, optimizer: torch.optim.Optimizer) -> set[int]:
        return {id(one) for group in optimizer.param_groups for one in group["params"]}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the masters by the parameters' names, plain float32 tensors."""
        return {name: master.detach() for name, _, master in self._pairs()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Copy the masters from ``state_dict``, and write them back.

        Raises:
            OperandError: it has other names than the model's low-precision parameters.
        """
        wanted = {name for name, _, _ in self._pairs()}
        if wanted != set(state_dict):
            raise OperandError(
                f"MasterWeights.load_state_dict: missing {sorted(wanted - set(state_dict))}, "
                f"unexpected {sorted(set(state_dict) - wanted)}."
            )
        for name, _, master in self._pairs():
            master.copy_(state_dict[name])
        self.write_back()

    def _pairs(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is not parameter:
                yield name, parameter, master


def _master(parameter: torch.nn.Parameter) -> torch.Tensor:
    own: torch.Tensor = parameter
    if not isinstance(own, QuantizedTensor):
        if own.dtype not in (torch.bfloat16, torch.float16):
            return own
        return own.detach().float().requires_grad_()
    value = own.get_high_precision_init_val()
    own.clear_high_precision_init_val()
    if value is None:
        with torch.no_grad():
            value = own.dequantize(torch.float32)
    return value.to(own.device, torch.float32).requires_grad_()
