"""A linear that saves its input as it came, and casts it again in backward.

``save_original_input``: where another module saves the same tensor anyway, as the norm or the
router before several experts does, the codes of the input are held in vain.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fp8core.chain.call import Call
from fp8core.chain.protocol import Backward, Forward, Out, Params, Program, SavedList, Wrapper
from fp8core.chain.request import Handover
from fp8core.tensors.quantizer import Orientations, TensorQuantizer


class SavingInput(Wrapper):
    """Around a linear program whose weight is trained: forward casts the input rowwise and saves
    the tensor, backward casts it columnwise.

    ``again`` is the quantizer for that, which counts no NaN or inf, as forward's did. The program
    takes its input as a tensor, so no operation before it is fused with the cast.
    """

    __slots__ = ("_columnwise", "_rowwise")

    def __init__(self, inner: Program, again: TensorQuantizer) -> None:
        super().__init__(inner, None)
        request = inner.input_request
        assert request is not None
        self._rowwise = dataclasses.replace(request, columnwise=False, cast=None)
        self._columnwise = dataclasses.replace(request, quantizer=again, rowwise=False, cast=None)

    def forward(self, x: Any, params: Params, call: Call, out: Out = None) -> Forward:
        """Compute y; save ``x`` in the place of its columnwise operand."""
        cast = self._rowwise(x)
        operands = Orientations(cast.operands.rowwise, (x, None, None))
        return self._inner.forward(Handover(operands, cast.rows), params, call, out)

    def backward(
        self, grad: Any, saved: SavedList, context: Any, call: Call, out: Out = None
    ) -> Backward:
        """Cast the input columnwise, then run the inner program's backward."""
        grad = self._grad(grad, call)
        x = saved[0]
        assert x is not None  # forward saved it
        saved[:3] = self._columnwise(x).operands.columnwise
        return self._inner.backward(grad, saved, context, call, out)
