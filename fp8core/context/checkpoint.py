"""Activation recompute that repeats the forward exactly, with its recipe and its random numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint

from fp8core.context.autocast import activated, active_name
from fp8core.context.recompute import Tape, current, playing
from fp8core.dispatch import policy
from fp8core.errors import UnsupportedError
from fp8core.torch_ops.private import pytree


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: object | None = None,
    tp_group: object | None = None,
    use_reentrant: bool = True,
    **kwargs: Any,
) -> Any:
    """Compute ``function(*args, **kwargs)`` keeping its inputs, and recompute it in backward.

    The recompute runs under the ``autocast`` and ``use_backend`` that were active in forward, draws
    the same random numbers and records no amax, so results and gradients equal those without
    checkpointing bit for bit, and delayed scales advance once.

    Args:
        function: a module or function of tensors.
        use_reentrant: as in ``torch.utils.checkpoint``, which this function calls.
        distribute_saved_activations, get_rng_state_tracker: tensor parallelism, not offered; a
            value that asks for it raises UnsupportedError.
        tp_group: the ranks to distribute saved activations over, so it changes nothing.
    """
    for name, value in (
        ("distribute_saved_activations", distribute_saved_activations),
        ("get_rng_state_tracker", get_rng_state_tracker),
    ):
        if value:
            raise UnsupportedError(f"checkpoint({name}={value!r}) is not offered.")
    active, chosen = active_name(), policy.current()
    tape = Tape(torch.is_grad_enabled(), outer=current())
    is_first = True
    # Of a forward that raises, torch 2.11 leaves the hooks open for as long as the error lives.
    error: BaseException | None = None

    def run(*inputs: Any, **named: Any) -> Any:
        nonlocal error, is_first
        is_forward, is_first = is_first, False
        if not is_forward:
            tape.replay()
        try:
            with activated(active), policy.activated(chosen), playing(tape):
                outputs = function(*inputs, **named)
        except BaseException as raised:
            if use_reentrant or not is_forward:
                raise
            error = raised
            return None
        return pytree.tree_map_only(torch.Tensor, _apart, outputs) if use_reentrant else outputs

    if use_reentrant and kwargs:  # torch takes no keywords there: gradients would get lost
        for name, value in kwargs.items():
            if isinstance(value, torch.Tensor) and value.requires_grad:
                raise UnsupportedError(
                    f"checkpoint({name}=tensor that requires gradients) needs use_reentrant=False, "
                    f"or the tensor as a positional argument."
                )
        run, kwargs = partial(run, **kwargs), {}
    outputs = torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=use_reentrant, **kwargs)
    if error is not None:
        try:
            raise error
        finally:
            error = None  # which its traceback refers to
    return outputs


def _apart(output: torch.Tensor) -> torch.Tensor:
    """Return ``output``, but a view of a parameter, as a layer with ``return_bias`` returns it.

    torch's function makes what it returns its own result: the parameter, a frozen one too, would be
    no leaf any more, and backward of the next step would run that of this one.
    """
    is_parameter = isinstance(output, torch.nn.Parameter) or output.requires_grad
    return output.view_as(output) if output.is_leaf and is_parameter else output
