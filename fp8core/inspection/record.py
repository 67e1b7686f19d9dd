"""The requests of a chain for operations, recorded in a dry run of its binding without backends."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch

from fp8core.backend_api import Alignment, OpDesc, QuantizeDesc, Ranks
from fp8core.chain.bind import bind_chain
from fp8core.chain.shape import BindContext, LinkShape
from fp8core.dispatch.optional import Offers
from fp8core.dispatch.resolver import Purpose
from fp8core.dispatch.select import Choice
from fp8core.dispatch.table import Resolved
from fp8core.recipe.plan import Plan
from fp8core.tensors.quantizer_binding import Binding

__all__ = ["Request", "record"]


class Request(NamedTuple):
    """A requested descriptor, and its purpose."""

    purpose: Purpose
    desc: OpDesc


def record(shapes: Sequence[LinkShape], plan: Plan, dtype: torch.dtype) -> list[Request]:
    """Return the requests of the links of ``shapes`` under ``plan`` on activations of ``dtype``.

    They are in the order of the chain, each once for each of its purposes. Optional operations are
    among them, and the operations that run if no backend offers these. The halves of a cast are
    not, as every backend that casts in both orientations also casts in either one.
    """
    return list(_recorded(tuple(shapes), plan, dtype))


@functools.lru_cache(maxsize=256)  # each operation of a recipe is found among the same chains
def _recorded(shapes: tuple[LinkShape, ...], plan: Plan, dtype: torch.dtype) -> tuple[Request, ...]:
    recorder = _Recorder()
    binding = Binding(torch.device("meta"), dtype, resolver=recorder)
    bind_chain(shapes, BindContext.of(plan, binding, "a record"))
    requests = [request for request in recorder.requests if request not in recorder.halves]
    return tuple(sorted(dict.fromkeys(requests), key=_position))


def _position(request: Request) -> int:
    return request.purpose.position


class _Recorder:
    """A resolver that records all requests and refuses the optional ones; no result can run."""

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

    def transfers(self, ranks: Ranks, device: torch.device, dtype: torch.dtype) -> None:
        """Return None: nothing is moved."""


def _cannot_run(*arguments: Any, **keywords: Any) -> NoReturn:
    raise AssertionError("an operation of a record was called")
