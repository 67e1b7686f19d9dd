"""A backend that computes as the reference does, and moves rows beside its products: a plug-in.

Rows travel by the asynchronous collectives of their communicator, so that ranks may be processes
with a gloo group, or threads. A product has one algorithm, for blocks of few rows, so that a part
of it has the bits of the whole. A second backend computes the same products, and moves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeGuard

import torch

from fp8core.backend_api import API_VERSION, BackendSpec, GemmDesc, OpDesc, Operand, Ranks, hookimpl
from fp8core.collectives import named
from fp8core.formats import by_name
from fp8core_backends.reference.backend import ReferenceBackend

NAME, PLAIN_NAME = "overlapping", "blockwise"
BLOCK = 32
FEWEST_BYTES = 2048


@hookimpl
def fp8core_register_backends(register: Callable[[BackendSpec], None]) -> None:
    for name, kind in ((NAME, "Backend"), (PLAIN_NAME, "PlainBackend")):
        register(
            BackendSpec(
                name=name,
                device_types=("cpu",),
                factory=f"tests.overlapping_backend:{kind}",
                priority=-1,
                api_version=API_VERSION,
                operand_fields=("row_scaled", "four_over_six", "scale_max"),
            )
        )


LOG: dict[int, list[str]] = {}
"""What happened on each rank, in order."""


def note(rank: int, event: str) -> None:
    LOG.setdefault(rank, []).append(event)


class Product:
    """A product by blocks of rows, and parts of it by the same blocks."""

    def __init__(self, run: Callable[..., torch.Tensor], desc: GemmDesc) -> None:
        self._run = run
        self._desc = desc

    def __call__(self, a: Operand, b: Operand, **given: Any) -> torch.Tensor:
        rows, out = a.data.shape[0], given.pop("out", None)
        if rows % BLOCK or not rows:
            return self._run(a, b, out=out, **given)
        if out is None:
            out = a.data.new_empty((rows, b.data.shape[0]), dtype=self._desc.out_dtype)
            if self._desc.accumulate:
                out.zero_()
        for at, part in self._blocks(a):
            self._run(part, b, out=out[at : at + BLOCK], **given)
        return out

    def _blocks(self, a: Operand) -> Iterator[tuple[int, Operand]]:
        spec = self._desc.a
        step = 0 if spec is None else spec.block[0]
        for at in range(0, a.data.shape[0], BLOCK):
            data, scale, outer = a
            if scale is not None and step:
                scale = scale[at // step : (at + BLOCK - 1) // step + 1]
            if outer is not None and spec is not None and spec.row_scaled:
                outer = outer[at : at + BLOCK]
            yield at, Operand(data[at : at + BLOCK], scale, outer)


class ProductInParts(Product):
    def __call__(  # type: ignore[override]  # of a descriptor with part
        self,
        rows: int,
        a: Operand,
        b: Operand,
        *,
        bias: torch.Tensor | None = None,
        out: torch.Tensor,
    ) -> torch.Tensor:
        for log in LOG.values():
            log.append(f"product of {a.data.shape[0]} of {rows} rows")
        return super().__call__(a, b, bias=bias, out=out)


class PlainBackend(ReferenceBackend):
    def bind(self, desc: OpDesc, device: torch.device) -> Callable[..., Any]:
        run = super().bind(desc, device)
        if not is_by_blocks(desc):
            return run
        return (ProductInParts if desc.part else Product)(run, desc)


def is_by_blocks(desc: OpDesc) -> TypeGuard[GemmDesc]:
    return type(desc) is GemmDesc and (desc.a is None or desc.a.block[0] <= BLOCK)


class Backend(PlainBackend):
    def unsupported(self, desc: OpDesc, device: torch.device) -> str | None:
        if not is_by_blocks(desc) or not desc.part:
            return super().unsupported(desc, device)
        if desc.accumulate or (desc.a is not None and by_name(desc.a.format).bits == 4):
            return "no parts of sums, or of packed codes"
        return super().unsupported(replace(desc, part=False), device)

    def transfers(self, ranks: Ranks, device: torch.device) -> Transfers:
        return Transfers(ranks)


class Transfers:
    def __init__(self, ranks: Ranks) -> None:
        self._communicator = named(ranks.group_name)
        self._rank = ranks.rank

    def takes(self, num_bytes: int) -> bool:
        return num_bytes >= FEWEST_BYTES

    def gather(self, x: torch.Tensor) -> tuple[torch.Tensor, Callable[[int], object]]:
        note(self._rank, f"gather of {x.dtype} {list(x.shape)}")
        result, finish = self._communicator._gather(x)
        arrived = []

        def arrive(rank: int) -> None:
            note(self._rank, f"rows of rank {rank}")
            if not arrived:
                finish()
                arrived.append(rank)

        return result, arrive

    def maximum(self, x: torch.Tensor) -> torch.Tensor | None:
        if x.is_meta:
            return x
        note(self._rank, f"maximum of {x.dtype} {list(x.shape)}")
        result, finish = self._communicator._all_reduce(x, "max")
        finish()
        return result

    def scatter(self, size: Sequence[int], dtype: torch.dtype) -> Sending:
        note(self._rank, f"scatter of {dtype} {list(size)}")
        return Sending(self._communicator, size, dtype)


class Sending:
    def __init__(self, communicator: Any, size: Sequence[int], dtype: torch.dtype) -> None:
        ranks, me = communicator.size, communicator.rank
        self._communicator = communicator
        self._parts = torch.empty(ranks, *size, dtype=dtype)
        self.order = [(me + step) % ranks for step in range(1, ranks)]

    def part(self, rank: int) -> torch.Tensor:
        return self._parts[rank]

    def send(self, rank: int) -> None:
        note(self._communicator.rank, f"send to rank {rank}")

    def finish(self, mine: torch.Tensor) -> tuple[torch.Tensor, Callable[[], object]]:
        me, rows = self._communicator.rank, mine.shape[0]
        others = sorted(self.order)
        counts = [rows * (rank != me) for rank in range(self._communicator.size)]
        sent = torch.cat([self._parts[rank] for rank in others])
        received, wait = self._communicator._exchange(sent, counts, counts)
        result = torch.empty_like(mine)

        def finish() -> None:
            note(self._communicator.rank, "sum")
            wait()
            parts = dict(zip(others, received.chunk(len(others)), strict=True)) | {me: mine}
            total, *rest = (parts[rank] for rank in range(self._communicator.size))
            for part in rest:
                total = total + part
            result.copy_(total)

        return result, finish
