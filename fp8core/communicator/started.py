"""A collective that was started, and its end."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fp8core.errors import CollectiveError, Fp8CoreError

__all__ = ["Started"]


class Started:
    """The result of a collective that may still be under way; :meth:`wait` returns it.

    It keeps the tensors of the collective alive. Until it is waited for, nobody may write to the
    tensor that was given to the collective. On a GPU, waiting makes the current stream wait, and
    not the host.
    """

    __slots__ = ("_arrive", "_finish", "_kept", "_result", "_stage")

    def __init__(
        self,
        result: torch.Tensor,
        finish: Callable[[], object] | None = None,
        kept: torch.Tensor | None = None,
        stage: Callable[[], str] = str,
        arrive: Callable[[int], object] | None = None,
    ) -> None:
        """``finish`` blocks until ``result`` is complete; None: it is already.

        ``kept`` is the tensor that is sent; ``stage()`` describes the collective for an error.
        ``arrive(rank)`` blocks until the rows of a rank are complete, None where they all come
        together.
        """
        self._result = result
        self._finish = finish
        self._kept = kept
        self._stage = stage
        self._arrive = arrive

    def rows_of(self, rank: int, size: int) -> torch.Tensor:
        """Return the rows of one of ``size`` ranks, as soon as they are here.

        Raises:
            CollectiveError: as :meth:`wait`.
        """
        arrive = self._arrive
        if self._finish is None or arrive is None:
            return self.wait().chunk(size)[rank]
        self._blocking(lambda: arrive(rank))
        return self._result.chunk(size)[rank]

    def wait(self) -> torch.Tensor:
        """Return the result; a second call returns it again.

        Raises:
            CollectiveError: the collective failed, for instance because a rank did not take part
                before the group's timeout.
            OperandError: another rank compares something meanwhile, and shows what differs.
        """
        if self._finish is not None:
            self._blocking(self._finish)
            self._finish = self._kept = self._arrive = None
        return self._result

    def _blocking(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Fp8CoreError:
            raise
        except RuntimeError as error:
            raise CollectiveError.of(self._stage(), error) from None
