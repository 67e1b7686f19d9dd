"""Graphs of cuDNN's attention that are built once and executed often.

A build takes 50 to 130 ms of the host, so that sizes that change from call to call are rounded
before they come here, and lengths stay on the device.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch

from fp8core.backend_api import AttentionDesc, UnsupportedError
from fp8core_backends.cuda.attention_graph import Problem, Uid, operand_type
from fp8core_backends.cuda.cudnn_frontend import execution
from fp8core_backends.cuda.memory import allocator

_MAX_PLANS = 1024  # of one descriptor in one thread


class _Plan(NamedTuple):
    """A graph that is ready, and the bytes of its workspace."""

    graph: Any
    workspace_bytes: int

    def execute(
        self, tensors: dict[Uid, torch.Tensor], empty: Callable[..., torch.Tensor], handle: int
    ) -> None:
        """Execute the graph with ``tensors`` and a workspace from ``empty``."""
        workspace = empty((max(self.workspace_bytes, 1),), (1,), torch.uint8)
        addresses = {int(uid): tensor.data_ptr() for uid, tensor in tensors.items()}
        self.graph.execute(addresses, workspace.data_ptr(), handle)


class _Plans(threading.local):
    """The graphs of one thread: cuDNN's plans are not promised to serve several at once."""

    def __init__(self) -> None:
        self.by_problem: OrderedDict[Problem, _Plan] = OrderedDict()


class Graphs:
    """The graphs of one operation on one device; of many, those used last.

    Attributes:
        built: how many were built in this process, for all operations.
    """

    built: ClassVar[int] = 0

    __slots__ = ("_add", "_desc", "_empty", "_index", "_plans")

    def __init__(self, add: Callable[..., None], desc: AttentionDesc, index: int) -> None:
        self._add, self._desc, self._index = add, desc, index
        self._empty = allocator(index)
        self._plans = _Plans()

    def run(self, problem: Problem, tensors: dict[Uid, torch.Tensor]) -> None:
        """Execute the graph of ``problem``, on the current device."""
        cudnn, handle = execution(self._index)
        plans = self._plans.by_problem
        plan = plans.get(problem)
        if plan is None:
            plan = self._build(cudnn, handle, problem)
            Graphs.built += 1
            if len(plans) >= _MAX_PLANS:  # ragged sizes without end
                plans.popitem(last=False)
            plans[problem] = plan
        else:
            plans.move_to_end(problem)
        plan.execute(tensors, self._empty, handle)

    def _build(self, cudnn: Any, handle: int, problem: Problem) -> _Plan:
        desc, types = self._desc, cudnn.data_type
        graph = cudnn.pygraph(
            name=desc.op,
            io_data_type=operand_type(cudnn, desc),
            intermediate_data_type=types.FLOAT,
            compute_data_type=types.FLOAT,
            handle=handle,
        )
        try:
            self._add(cudnn, graph, desc, problem)
            graph.validate()
            graph.build_operation_graph()
            graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
            graph.check_support()
            graph.build_plans()
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError) as error:
            reason = str(error).partition("\n")[0]
            raise UnsupportedError(f"{desc} with {problem}: cuDNN refuses it: {reason}") from None
        return _Plan(graph, graph.get_workspace_size())
