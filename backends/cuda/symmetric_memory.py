"""Memory of which every rank of a group can read the others' part, and copies between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from fp8core_backends.cuda.private import symmetric_empty, symmetric_handle, timeout_of
from fp8core_backends.cuda.stream import index_of, raw_stream

_MOST_VIEWS = 64
"""Views of a buffer that are remembered; more than these many sizes vary from step to step."""


def meet(store: Any, number: int, rank: int, size: int, timeout: timedelta) -> None:
    """Wait on the host until every rank is at its meeting of this ``number``.

    Raises:
        RuntimeError: one did not come in time; it is named. torch, which would wait for it in what
            follows, waits as long as the store of the group does, and names nobody.
    """
    keys = [f"fp8core shares memory {number}, rank {peer}" for peer in range(size)]
    store.set(keys[rank], "here")
    for member, key in enumerate(keys):
        try:
            store.wait([key], timeout)
        except RuntimeError:
            raise RuntimeError(
                f"rank {member} did not come to share memory with rank {rank} within "
                f"{timeout.total_seconds():g} s"
            ) from None


class Slot:
    """A buffer of ``num_bytes`` on every rank of a group, that all of them read.

    Allocating it is a collective of the group, for which the ranks :func:`meet`.
    """

    def __init__(self, num_bytes: int, group_name: str, device: torch.device) -> None:
        self.num_bytes = num_bytes
        # As a collective of the group: a barrier that other ranks do not reach in time names them,
        # and ends this process's work on the device.
        self._timeout_ms = int(timeout_of(group_name, device).total_seconds() * 1000)
        self._buffer = symmetric_empty(num_bytes, device)
        # torch fills it, and the signals of barriers, with zeros on a stream: a signal that another
        # rank sets before that would be lost.
        torch.cuda.synchronize(device)
        try:
            self._handle = symmetric_handle(self._buffer, group_name)
        except RuntimeError as error:
            raise RuntimeError(
                f"{error} The ranks of group {group_name!r} could not share {num_bytes} bytes of "
                f"their GPUs' memory: FP8CORE_TRANSFERS=0 on all of them leaves rows to NCCL."
            ) from error
        self._views: dict[Any, torch.Tensor] = {}

    def of(
        self, rank: int, size: Sequence[int], dtype: torch.dtype, index: int = 0
    ) -> torch.Tensor:
        """Return the ``index``-th tensor of this size in the buffer of a rank."""
        key = (rank, tuple(size), dtype, index)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            offset = index * math.prod(size)
            view = self._handle.get_buffer(rank, tuple(size), dtype, offset)
            self._views[key] = view
        return view

    def barrier(self) -> None:
        """Have the current stream wait until those of all ranks are here."""
        self._handle.barrier(channel=0, timeout_ms=self._timeout_ms)


class Lane:
    """A stream of copies beside the current one. Copies between devices run on copy engines."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._index = index_of(device)
        self._created: Any = None

    @property
    def _stream(self) -> Any:
        if self._created is None:
            self._created = torch.cuda.Stream(self._device, priority=-1)  # type: ignore[no-untyped-call]  # torch's
        return self._created

    @property
    def is_captured(self) -> bool:
        """Whether the current stream is being captured in a graph."""
        return torch.cuda.is_current_stream_capturing()

    @property
    def current(self) -> int:
        """The current stream, as a number."""
        return raw_stream(self._index)

    def follow(self) -> None:
        """Have later copies wait for what the current stream has been given so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> Any:
        """Copy; returns what :meth:`wait` waits for."""
        with torch.cuda.stream(self._stream):
            to.copy_(source)
        return self._stream.record_event()

    def add(self, to: torch.Tensor, addend: torch.Tensor) -> Any:
        """Add ``addend`` to ``to``; returns what :meth:`wait` waits for."""
        with torch.cuda.stream(self._stream):
            to.add_(addend)
        return self._stream.record_event()

    def wait(self, event: Any) -> None:
        """Have the current stream wait for a copy."""
        torch.cuda.current_stream(self._device).wait_event(event)
