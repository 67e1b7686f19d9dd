"""Master copies in float32, which an optimizer steps for parameters of lower precision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from fp8core.errors import OperandError
from fp8core.reporting import log_once, some
from fp8core.tensors.checks import misfit
from fp8core.tensors.parameter.shared_grad import (
    MAKE,
    Stepping,
    hold_grad,
    share_grad,
    stepped_by,
    summed_grad,
    watch_optimizers,
)
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.sharded_weight import local_part
from fp8core.torch_ops.capture import has_no_values, untraced


def make_master(parameter: torch.nn.Parameter, name: str, stepping: Stepping) -> torch.Tensor:
    """Return the float32 tensor to step for ``parameter``: itself if it has that precision.

    Raises:
        OperandError: the parameter is on the meta device.
    """
    stored: torch.Tensor = parameter
    is_quantized = isinstance(stored, QuantizedTensor)
    if not is_quantized and stored.dtype not in (torch.bfloat16, torch.float16):
        return stored
    if stored.is_meta:
        raise OperandError(
            f"MasterWeights of a model with {name!r} on the meta device: make it after to_empty() "
            f"and the initialization, or loading, of the values."
        )
    if isinstance(stored, QuantizedTensor):
        value = _initial_value(stored)
    else:
        value = stored.detach().float()
    return share_grad(value.requires_grad_(), stored, name, stepping)


@torch.no_grad()
def _initial_value(parameter: QuantizedTensor) -> torch.Tensor:
    """Return the initial value that was kept, or, if the parameter was written since, its value."""
    initial = parameter.get_high_precision_init_val()
    if initial is not None:
        initial = initial.to(parameter.device)
        if is_rounded(initial, parameter):
            return initial.to(torch.float32, copy=True)
        log_once(
            "MasterWeights: a quantized parameter was written after its initial value was kept, as "
            "a checkpoint does it; such masters start as the parameters' values."
        )
    return parameter.dequantize(torch.float32)


def forget_initial_values(parameters: Iterable[torch.Tensor]) -> None:
    """Free the initial values that quantized parameters kept, once all masters have theirs."""
    for parameter in parameters:
        if isinstance(parameter, QuantizedTensor):
            parameter.clear_high_precision_init_val()


def fits(master: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether both have the same shape and are on the same device."""
    return (parameter.shape, parameter.device) == (master.shape, master.device)


# By how much scales that are no powers of two may change when stored values are quantized again.
_SCALE_MOVES = 8 * 2.0**-24


@torch.no_grad()
def is_rounded(value: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether writing ``value`` to ``parameter`` changes nothing; waits for the device."""
    if has_no_values(value):
        return True
    stored = parameter.detach()
    again = stored.clone()
    again.copy_(value)
    expected, present = local_part(again.float()), local_part(stored.float())
    if torch.allclose(expected, present, _SCALE_MOVES, 0.0, equal_nan=True):
        return True
    # Codes whose scale does not follow from their amax change when they are quantized again.
    return isinstance(stored, QuantizedTensor) and torch.equal(present, value.float())


_AGAIN = "Make a new MasterWeights, or load_state_dict() into this one"


class MasterWeights:
    """Float32 copies of a model's low-precision parameters, for any optimizer to step.

    ::

        masters = fp8core.MasterWeights(model)
        optimizer = torch.optim.AdamW(masters.parameters())
        masters.attach(optimizer)
        ...
        loss.backward()
        torch.nn.utils.clip_grad_norm_(masters.parameters(), 1.0)
        optimizer.step()  # the masters step, and the result goes to the parameters
        optimizer.zero_grad()

    Quantized, bfloat16 and float16 parameters that require gradients get a master; a float32
    parameter is stepped itself. A master starts as the initial value that
    ``quantized_model_init(preserve_high_precision_init_val=True)`` kept, which is then cleared, or
    as the parameter's value if none was kept or the parameter was written since.

    ``master.grad`` is ``parameter.grad``: one tensor, converted to float32 by the first access
    through the master. So clip on either side, and use ``torch.amp.GradScaler`` as without masters.
    Until that access microbatches add up in the parameter's dtype; ``collect_grads()`` after the
    first microbatch is such an access. A step clears the gradients that it used. A parameter with a
    ``main_grad`` is stepped with that; ``zero_grad()`` zeroes it, a step leaves it as it is.

    Construct it when the model is on its device, wrapped and sharded, and its checkpoint loaded. A
    checkpoint from which training continues bit for bit holds ``masters.state_dict()`` besides the
    model's and the optimizer's.

    Raises:
        OperandError: a parameter is on the meta device, or ``model`` is no module.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        if not isinstance(model, torch.nn.Module):
            raise OperandError(
                f"MasterWeights({type(model).__name__}): expected a torch.nn.Module, whose "
                f"parameters have names."
            )
        watch_optimizers()
        self._model = model
        self._stepping = Stepping()
        named = model.named_parameters()
        self._parameters = {name: parameter for name, parameter in named if parameter.requires_grad}
        with torch.inference_mode(False):  # inference tensors could not be stepped
            self._masters = {
                name: make_master(parameter, name, self._stepping)
                for name, parameter in self._parameters.items()
            }
        forget_initial_values(self._parameters.values())
        self._versions: dict[str, tuple[int, int]] = {}
        self._remember()
        self._is_compared = False

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield the tensors to step, one for each parameter, in the model's order."""
        yield from self._masters.values()

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors to step with their parameters' names, to sort them into groups."""
        yield from self._masters.items()

    def attach(self, optimizer: torch.optim.Optimizer) -> None:
        """Have ``optimizer.step()`` write the masters that it stepped back to the parameters.

        Several optimizers may share the masters; each writes back those that it steps. A closure is
        called when the current values of the masters have been written back.

        Raises:
            OperandError: the optimizer steps the parameters, or other tensors, or is none of
                torch's; or, at a step, a parameter no longer belongs to its master.
        """
        kind = type(optimizer).__name__
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise OperandError(f"attach({kind}): expected a torch optimizer, for its hooks.")
        if optimizer in self._stepping.attached:
            return
        stepped = {*map(id, stepped_by(optimizer))}
        if not stepped & {*map(id, self.parameters())}:
            raise OperandError(f"{kind} was made for other tensors than these masters. {MAKE}")
        try:
            optimizer.register_step_pre_hook(self._before)
        except AttributeError:  # its __init__ never called torch's
            raise OperandError(
                f"attach({kind}): it has no hooks, as a wrapper around an optimizer has none. "
                f"Attach the optimizer that it wraps."
            ) from None
        optimizer.register_step_post_hook(self._after)
        self._stepping.attached.add(optimizer)
        self._stepping.use()

    @untraced
    def _before(
        self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        stepped = {*map(id, stepped_by(optimizer))}
        has_gradient = self._check(stepped)
        self._stepping.depth += 1  # for an optimizer inside this one

        def at_the_masters(closure: Callable[[], Any]) -> Callable[[], Any]:
            def evaluate() -> Any:
                self._round(stepped)
                loss = closure()
                self._check(stepped)
                return loss

            return evaluate

        if kwargs.get("closure") is not None:
            return args, {**kwargs, "closure": at_the_masters(kwargs["closure"])}
        if len(args) > 1 and args[1] is not None:
            return (args[0], at_the_masters(args[1]), *args[2:]), kwargs
        if not has_gradient:
            log_once(
                f"{type(optimizer).__name__}.step() found no gradient on any of the masters that "
                f"it steps, and moves nothing. Each step clears the gradients that it used."
            )
        for _, _, master in self._pairs(stepped):
            hold_grad(master, master.grad)
        return args, kwargs

    @untraced
    def _after(self, optimizer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._write({*map(id, stepped_by(optimizer))})

    def collect_grads(self) -> None:
        """Convert the gradients to float32 now, so that later backward passes add in float32.

        Without attach(), a step is collect_grads(), optimizer.step(), write_back().

        Raises:
            OperandError: a parameter was written by other code, and the masters would undo that; or
                an optimizer stepped since the last collect_grads(), and write_back() is missing.
        """
        if self._stepping.stepped:
            raise OperandError(
                "collect_grads(): the masters were stepped, but not written back to the "
                "parameters. Call masters.write_back() after optimizer.step()."
            )
        self._check({*map(id, self.parameters())})
        self._stepping.use()
        self._stepping.is_collected, self._stepping.depth = True, 0

    def write_back(self) -> None:
        """Round the masters into the parameters, and clear the gradients."""
        self._write({*map(id, self.parameters())})
        self._stepping.is_collected = False

    def _write(self, stepped: set[int]) -> None:
        self._round(stepped)
        for name, master in self._masters.items():
            if id(master) in stepped:
                self._parameters[name].grad = None
                hold_grad(master, None)
        self._stepping.stepped -= stepped
        self._stepping.depth = 0

    @torch.no_grad()
    def _round(self, stepped: set[int]) -> None:
        for _, parameter, master in self._pairs(stepped):
            parameter.copy_(master)
        self._remember(stepped)

    def _remember(self, stepped: set[int] | None = None) -> None:
        for name, parameter, master in self._pairs(stepped):
            self._versions[name] = parameter._version, master._version

    def _check(self, stepped: set[int]) -> bool:
        """Return whether a stepped master has a gradient; raise if one misfits its parameter."""
        self._check_members(stepped)
        for name, parameter, master in self._pairs(stepped):
            if not fits(master, parameter):
                raise OperandError(
                    f"parameter {name!r} is now {list(parameter.shape)} on {parameter.device}, its "
                    f"master {list(master.shape)} on {master.device}. {_AGAIN.split(',')[0]}."
                )
            parameter_was, master_was = self._versions[name]
            if parameter._version != parameter_was:
                raise OperandError(
                    f"parameter {name!r} was written since its master was, and the step would undo "
                    f"that. {_AGAIN}."
                )
            if master._version != master_was:
                raise OperandError(
                    f"the master of {name!r} was written, and the parameter was not: the forward "
                    f"read an old value. Call masters.write_back() after writing to a master."
                )
        if not self._is_compared:
            self._check_start()
        self._is_compared = True
        grads = [master.grad for master in self.parameters() if id(master) in stepped]
        return any(grad is not None for grad in grads)

    def _check_members(self, stepped: set[int]) -> None:
        """Raise if a parameter has a gradient that the optimizer does not use."""
        names = {id(parameter): name for name, parameter, _ in self._pairs()}
        for key in stepped & set(names):
            raise OperandError(f"the optimizer steps the parameter {names[key]!r} itself. {MAKE}")
        strangers = []
        for name, parameter in self._model.named_parameters():
            if parameter.grad is None and summed_grad(parameter) is None:
                continue
            trained = self._parameters.get(name)
            if trained is parameter:
                if (
                    trained is self._masters[name]
                    and trained.grad is None
                    and trained.requires_grad
                ):
                    raise OperandError(
                        f"the gradient of {name!r} is in main_grad, where no optimizer looks: in "
                        f"float32 it has no master. Set .grad = .main_grad before the step."
                    )
            elif trained is not None:
                raise OperandError(
                    f"parameter {name!r} was replaced since its master was made, so that its "
                    f"gradient reaches nobody. Make MasterWeights and the optimizer again."
                )
            elif id(parameter) not in stepped:
                strangers.append(name)
        if strangers:
            log_once(
                f"{some(strangers)} got gradients but no master: added or unfrozen after "
                f"MasterWeights was made, which does not step them."
            )

    def _check_start(self) -> None:
        """Raise if a parameter was written before the first step, counted by torch or not."""
        for name, parameter, master in self._pairs():
            if fits(master, parameter) and not is_rounded(master, parameter):
                raise OperandError(
                    f"parameter {name!r} was written since its master was (by a checkpoint or a "
                    f"broadcast?), and the step would undo that. {_AGAIN}."
                )

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the masters by the parameters' names, plain float32 tensors."""
        return {name: master.detach() for name, _, master in self._pairs()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Copy the masters from ``state_dict``, and write them back.

        Raises:
            OperandError: it has other names or shapes than the model's low-precision parameters.
        """
        names = {name for name, _, _ in self._pairs()}
        if names != set(state_dict):
            raise OperandError(
                f"MasterWeights.load_state_dict: missing {sorted(names - set(state_dict))}, "
                f"unexpected {sorted(set(state_dict) - names)}."
            )
        for name, _, master in self._pairs():
            value: Any = state_dict[name]
            fault = misfit(value, master)
            if fault is not None:
                raise OperandError(
                    f"MasterWeights.load_state_dict: {name!r} {fault}. Nothing was loaded."
                )
        for name, _, master in self._pairs():
            master.copy_(state_dict[name])
        self._round({*map(id, self.parameters())})
        self._stepping.stepped.clear()

    def _pairs(
        self, stepped: set[int] | None = None
    ) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        for name, parameter in self._parameters.items():
            master = self._masters[name]
            if master is not parameter and (stepped is None or id(master) in stepped):
                yield name, parameter, master
