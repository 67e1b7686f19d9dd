"""How a layer runs its links: as they are, or as a checkpoint's forward ran them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from fp8core.chain import run as chain
from fp8core.chain.call import Call
from fp8core.context import recompute
from fp8core.dispatch import policy
from fp8core.modules.base import LowPrecisionModule
from fp8core.modules.bound import Bound
from fp8core.tensors.scaling import offered_scale
from fp8core.tensors.slots import BUFFERS

__all__ = ["run_links"]


def run_links(
    layer: LowPrecisionModule,
    bound: Bound,
    links: chain.Links,
    input: torch.Tensor,
    params: Sequence[torch.Tensor],
    call: Call,
) -> torch.Tensor:
    """Run some of the links of ``layer``, or repeat exactly what a checkpoint's forward ran.

    ``links`` is one of ``bound.parts``. A graph that torch captures has no tape.
    """
    if isinstance(links, int):
        return chain.run(links, input, params, call)
    first, store, tape = call.first_microbatch, layer._bindings.weights, recompute.current()
    if first is not None or store.scope is not None:
        call = call._replace(keeping=store.keeping(first, partial(_weight_origins, layer)))
    if tape is None:
        if bound.states is None or not recompute.is_in_backward():
            return chain.run(links, input, params, call)
        with recompute.scale_of(bound.states.forward, offered_scale(bound.states.forward)):
            return chain.run(links, input, params, call)
    state = None if bound.states is None else bound.states.forward
    key = (bound.recipe, input.device, input.dtype, policy.current())
    entry = tape.visit(layer.label, key, list(layer.parameters()), state, first)
    if not tape.is_repeating:
        if first is not None and tape.is_grad_enabled and call.keeping is not None:
            call = call._replace(keeping=call.keeping._replace(used=entry.weights))
        return chain.run(links, input, params, call)
    keeping = store.keeping(entry.first_microbatch, partial(_weight_origins, layer))
    if keeping is not None and entry.weights:
        keeping = keeping._replace(used=entry.weights)
    call = call._replace(backward_pass=tape.backward_pass, keeping=keeping)
    with recompute.scale_of(state, entry.scale):
        return chain.run(links, input, params, call)


def _weight_origins(layer: LowPrecisionModule) -> list[torch.Tensor]:
    """Return the tensors that a weight may be computed from in each forward, as by a
    parametrization: the layer's parameters, and its buffers but for delayed scales."""
    buffers = (buffer for name, buffer in layer.named_buffers() if name not in BUFFERS)
    return [*layer.parameters(), *buffers]
