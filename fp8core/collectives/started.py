"""A collective that was started, and its end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import torch

from fp8core.torch_ops.recorded import called_in_repeats

__all__ = ["Arrive", "End", "Started"]

End: TypeAlias = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Blocks until a result is complete, and returns it; called with the result and what was sent."""

Arrive: TypeAlias = Callable[[int, torch.Tensor, torch.Tensor], torch.Tensor]
"""Blocks until the rows of a rank are complete, and returns the result; called with the rank, the
result and what was sent."""


class Started:
    """The result of a collective that may still be under way; :meth:`wait` returns it.

    It keeps the tensors of the collective alive. Until it is waited for, nobody may write to the
    tensor that was given to the collective. On a GPU, waiting makes the current stream wait, and
    not the host.
    """

    __slots__ = ("_arrive", "_end", "_result", "_sent")

    def __init__(
        self,
        result: torch.Tensor,
        sent: torch.Tensor | None = None,
        end: End | None = None,
        arrive: Arrive | None = None,
    ) -> None:
        """``sent`` is the tensor that is sent, None where ``result`` is complete already;
        ``arrive`` is None where the rows of all ranks come together."""
        self._result = result
        self._sent = sent
        self._end = end
        self._arrive = arrive

    def rows_of(self, rank: int, size: int) -> torch.Tensor:
        """Return the rows of one of ``size`` ranks, as soon as they are here.

        Raises:
            CollectiveError: as :meth:`wait`.
        """
        if self._sent is None or self._arrive is None:
            return self.wait().chunk(size)[rank]
        result = called_in_repeats(partial(self._arrive, rank), self._result, self._sent)
        return result.chunk(size)[rank]

    def wait(self) -> torch.Tensor:
        """Return the result; a second call returns it again.

        Raises:
            CollectiveError: the collective failed, for instance because a rank did not take part
                before the group's timeout.
            OperandError: another rank compares something meanwhile, and shows what differs.
        """
        if self._sent is not None and self._end is not None:
            self._result = called_in_repeats(self._end, self._result, self._sent)
            self._sent = self._end = self._arrive = None
        return self._result

    def wait_as(self, of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Return ``of(self.wait())``, in repeats of a recorded run as well: a function of torch's
        operators, which a recorder may not know."""
        return called_in_repeats(of, self.wait())
