"""Calls of a chain that moves tensors between ranks: ranks compare each kind of call once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8core.collectives import Communicator
from fp8core.torch_ops.private import is_traced

__all__ = ["ComparedCalls", "gradients_text"]

_MOST_CALLS = 256


class ComparedCalls:
    """The kinds of calls of ``owner`` that the ranks of ``communicator`` have compared.

    Ranks whose calls differ would begin other collectives: of other sizes, where their inputs
    have others, and in backward alone, where one of them computes no gradients.
    """

    __slots__ = ("_calls", "_communicator", "_owner")

    def __init__(self, communicator: Communicator, owner: str) -> None:
        self._communicator = communicator
        self._owner = owner
        self._calls: set[tuple[Sequence[int] | None, tuple[bool, ...]]] = set()

    def compare(self, shape: Sequence[int] | None, needs_grad: Sequence[bool]) -> None:
        """Compare a call if it is the first of its kind; not while torch captures a graph.

        ``shape`` is that of the input, None where ranks may have others.

        Raises:
            OperandError: the calls of ranks differ; raised on every rank.
        """
        if shape is not None and any(type(size) is not int for size in shape):
            return  # symbols, while torch traces
        call = shape, tuple(needs_grad)
        if call in self._calls or torch.compiler.is_compiling() or is_traced():
            return
        text = gradients_text(needs_grad)
        text = text if shape is None else f"an input of {list(shape)}, {text}"
        self._communicator.agree(text, f"a call of {self._owner}")
        if len(self._calls) >= _MOST_CALLS:  # ragged sizes without end
            self._calls.clear()
        self._calls.add(call)


def gradients_text(needs_grad: Sequence[bool]) -> str:
    """Return whose gradient is due, in words: the input's, then the parameters'.

    >>> gradients_text((True, False, True))
    'gradients of the input and parameter 2'
    >>> gradients_text((False, False))
    'no gradients'
    """
    due = [str(at) for at, needs in enumerate(needs_grad) if needs and at]
    words = ["the input"] if needs_grad[0] else []
    if due:
        words.append(f"parameter{'s' if len(due) > 1 else ''} {', '.join(due)}")
    return f"gradients of {' and '.join(words)}" if words else "no gradients"
