"""What binding a chain asks for, written down instead of bound: no backend takes part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from fp8core.backend_api import Alignment, OpDesc, QuantizeDesc
from fp8core.chain.bind import bind_chain
from fp8core.chain.shape import BindContext, LinkShape
from fp8core.dispatch.optional import Offers
from fp8core.dispatch.resolver import Purpose
from fp8core.dispatch.select import Choice
from fp8core.dispatch.table import Resolved
from fp8core.recipe.plan import LinearPlan
from fp8core.tensors.quantizer import Binding

__all__ = ["Request", "record"]


class Request(NamedTuple):
    """A descriptor that was asked for, and what for."""

    purpose: Purpose
    desc: OpDesc


def record(shapes: Sequence[LinkShape], plan: LinearPlan, dtype: torch.dtype) -> list[Request]:
    """Return what the links of ``shapes`` ask for under ``plan`` on activations of ``dtype``.

    In the order of the chain, each once for each of its purposes. Optional operations are among
    it, and those that run where nobody offers them; the halves of a cast are not, as every backend
    that casts in both orientations does so in either one.
    """
    recorder = _Recorder()
    binding = Binding(torch.device("meta"), dtype, resolver=recorder)
    bind_chain(shapes, BindContext(plan, binding, "a record"))
    requests = [request for request in recorder.requests if request not in recorder.halves]
    return sorted(dict.fromkeys(requests), key=_position)


def _position(request: Request) -> int:
    return request.purpose.position


class _Recorder:
    """A resolver that offers every operation but the optional ones, and none that could run."""

    __slots__ = ("halves", "requests")

    def __init__(self) -> None:
        self.requests: list[Request] = []
        self.halves: set[Request] = set()

    def resolve(self, desc: OpDesc, device: torch.device, purpose: Purpose) -> Resolved:
        self.requests.append(Request(purpose, desc))
        if isinstance(desc, QuantizeDesc) and None not in (desc.rowwise, desc.columnwise):
            self.halves.update(Request(purpose, half) for half in desc.halves())
        choice = Choice(desc, device, "a record", "nothing runs", None, ())
        return Resolved(_cannot_run, Offers(), choice, Alignment())

    def resolve_optional(
        self, desc: OpDesc, device: torch.device, backend: str, purpose: Purpose
    ) -> None:
        self.requests.append(Request(purpose, desc))


def _cannot_run(*arguments: Any, **keywords: Any) -> NoReturn:
    raise AssertionError("an operation of a record was called")
