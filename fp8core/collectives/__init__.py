"""Collectives of layers over one group of ranks: the only place that calls torch.distributed for
them.

A :class:`Communicator` offers five collectives. Each is started by its call and finished by
``wait()`` on what the call returns, so that a caller can compute in between::

    communicator = of_group(group)            # or named(name), for the same object
    started = communicator.gather(codes)      # the shards of all ranks, along dimension 0
    compute_something_else()
    codes_of_all = started.wait()

In eager mode they call the process group itself; while torch captures a graph, they are the
functional collectives, which a graph can hold. A tensor whose elements have one byte, as FP8,
travels as uint8. Each communicator counts its calls and the bytes that its rank sends, see
:class:`Traffic`.
"""

from __future__ import annotations

from fp8core.collectives.base import Communicator
from fp8core.collectives.collective import BESIDE, IN_PARTS, PLAIN, READ, Count, Started, Traffic
from fp8core.collectives.process_group import named, of_group, register

__all__ = [
    "BESIDE",
    "IN_PARTS",
    "PLAIN",
    "READ",
    "Communicator",
    "Count",
    "Started",
    "Traffic",
    "named",
    "of_group",
    "register",
]
