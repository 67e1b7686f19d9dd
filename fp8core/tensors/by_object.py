"""Casts by an object of the user, which makes QuantizedTensors by the verbs of a quantizer."""

from __future__ import annotations

import threading
from typing import Any

import torch

from fp8core.dispatch.select import Choice
from fp8core.errors import OperandError
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.quantized_tensor import QuantizedTensor
from fp8core.tensors.quantizer import Groups, Orientations, TensorQuantizer
from fp8core.tensors.storage import storage_plan

_turns = threading.Lock()
"""Lets one cast run at a time: usages are set on the object, which layers may share."""


class ObjectQuantizer(TensorQuantizer):
    """Quantizes by ``maker``, an object with ``set_usage`` and a call that quantizes.

    ``plan`` is how it stores both orientations, ``role`` what messages call it.
    """

    __slots__ = ("_maker", "_plan", "_role", "choices")

    def __init__(self, maker: Any, plan: TensorPlan, role: str) -> None:
        self._maker = maker
        self._plan = storage_plan(plan)
        self._role = role
        self.choices: tuple[Choice, ...] = ()

    @property
    def plan(self) -> TensorPlan:
        """The specs by which ``maker`` stores both orientations."""
        return self._plan

    def __call__(
        self,
        x: torch.Tensor,
        groups: Groups = (),
        *,
        rowwise: bool = True,
        columnwise: bool = True,
        rng: torch.Tensor | None = None,
    ) -> Orientations:
        """Return what the object makes of ``x``, in the orientations asked for.

        Raises:
            OperandError: it makes something else.
        """
        with _turns, torch.no_grad():
            self._maker.set_usage(rowwise=rowwise, columnwise=columnwise)
            quantized = self._maker(x)
        usages = [(rowwise, "rowwise"), (columnwise, "columnwise")]
        if not isinstance(quantized, QuantizedTensor):
            raise OperandError(
                f"{self._role} returned {type(quantized).__name__}, no QuantizedTensor."
            )
        for (is_used, way), spec, planned in zip(usages, quantized.plan, self._plan, strict=True):
            if is_used and spec != planned:
                raise OperandError(
                    f"{self._role} is planned {way} as {planned}, and returned {spec}. What it "
                    f"makes has to be stored as its plan, or its make_empty(), says."
                )
        if (quantized.shape, quantized.device) != (x.shape, x.device):
            raise OperandError(
                f"{self._role} made {list(quantized.shape)} on {quantized.device} of "
                f"{list(x.shape)} on {x.device}."
            )
        row, column = quantized.operands
        return Orientations(row if rowwise else None, column if columnwise else None)
