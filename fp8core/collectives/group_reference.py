"""References to process groups that do not keep them alive.

``torch.distributed`` keeps a group until ``destroy_process_group``. Who kept it longer would keep
its threads: those of gloo free tensors that Python made, which ends a process by SIGABRT where the
interpreter is being finalized.
"""

from __future__ import annotations

from typing import TypeAlias
from weakref import ReferenceType

import torch.distributed as dist

from fp8core.errors import OperandError

__all__ = ["GroupReference", "existing"]

GroupReference: TypeAlias = ReferenceType["dist.ProcessGroup"]
"""``weakref.ref(group)``: the same object each time, as long as the group exists."""


def existing(reference: GroupReference, use: str) -> dist.ProcessGroup:
    """Return the group, ``use`` of which is asked for.

    Raises:
        OperandError: it was destroyed.
    """
    group = reference()
    if group is None:
        raise OperandError(
            f"{use}: the process group was destroyed, as by "
            f"torch.distributed.destroy_process_group. Give a group that exists."
        )
    return group
