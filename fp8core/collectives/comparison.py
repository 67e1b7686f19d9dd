"""A comparison of texts between ranks, by the key-value store of their group, not by a collective.

A rank that compares waits at the store. A rank that compares nothing and waits in a collective is
not disturbed, and finds in the store why the collective does not end::

    rank 0, still in its step               rank 1, whose recipe has changed
    -------------------------------------   ------------------------------------------
    gather ... does not end                 posts its claim: 17 collectives so far, text
    looks into the store: rank 1 compares,  waits for the claims of all
    and has not begun the 18th collective
    posts its own claim
    both raise an error with both claims

A comparison has two phases: of digests, and, where digests differ, of texts. The last rank to post
reads all posts and posts the verdict, so that every other rank reads one key.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from fp8core.errors import CollectiveError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-4, 2e-2
_SAME = "same"


class Claim(NamedTuple):
    """The claim of a rank about ``subject``, which ranks compare by its description, ``text``.

    ``waits_in`` is the collective in which the rank waits, "" for a rank that compares.
    """

    subject: str
    text: str
    waits_in: str = ""


DIGEST: Final = "digest "
"""Begins a part of a claim's text that says nothing to a reader: shown where no other differs."""


def differing_parts(texts: Sequence[str]) -> list[str]:
    """Return of each text the parts that some other text lacks; parts end with "; " or ". ".

    >>> differing_parts(["bf16. input e4m3; weight e4m3", "bf16. input e5m2; weight e4m3"])
    ['input e4m3', 'input e5m2']
    """
    split = [re.split(r"\. |; ", text) for text in texts]
    common = set(split[0]).intersection(*split)
    rest = [[part for part in parts if part not in common] for parts in split]
    read = [[part for part in parts if not part.startswith(DIGEST)] for parts in rest]
    return ["; ".join(parts) or "nothing of that" for parts in (read if any(read) else rest)]


class Comparisons:
    """The comparisons of one rank with the others of a group of ``size`` ranks, in order.

    ``store`` is a Store of torch.distributed, which all of them read and write.
    ``timeout_s`` is how long a rank waits for the others.
    """

    def __init__(self, store: Any, rank: int, size: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._number = 0
        # A new group may have the name, and so the keys, of a destroyed group. Groups therefore
        # have numbers: of all first comparisons at a store, each ``size`` belong to one group.
        self._group: int | None = None

    def compare(self, claim: Claim, collectives: int) -> list[Claim] | None:
        """Return the claims of all ranks if these differ, else None.

        ``collectives`` is the number of collectives that this rank has begun.

        Raises:
            CollectiveError: a rank did not compare anything before the timeout, or the store is
                gone, as after the end of the process that holds the store.
        """
        try:
            return self._compare(claim, collectives)
        except CollectiveError:
            raise
        except RuntimeError as error:
            stage = f"comparison of {claim.subject} by rank {self._rank}"
            raise CollectiveError.of(stage, error) from None

    def parted(self, collectives: int, claim: Callable[[str], Claim]) -> list[Claim] | None:
        """Return the claims of all ranks if a rank compares before it has begun the collective, of
        number ``collectives``, in which this rank waits; None if there is no such rank.

        ``claim(subject)`` gives this rank's claim about the subject of that comparison.
        """
        waiting = self.waiting(collectives, self._store)
        return self.compare(claim(waiting[0][1]), collectives) if waiting else None

    def waiting(self, collectives: int, store: Any) -> list[tuple[int, str]]:
        """Return the ranks that wait in a comparison and have begun fewer collectives, and what
        each of them compares.

        A thread beside that of the comparisons asks by a ``store`` of its own, whose timeout is
        short: the ranks may agree meanwhile, and keys be gone that it waits for.
        """
        if self._group is None:
            begun = store.add("fp8core/begun", 0)
            if not begun % self._size:
                return []
            prefix = self._prefix(begun // self._size, 0)
        else:
            prefix = self._prefix(self._group, self._number)
        if not store.check([f"{prefix}/digest/count"]):
            return []
        keys = {rank: f"{prefix}/digest/{rank}" for rank in range(self._size) if rank != self._rank}
        posts = {
            rank: json.loads(store.get(key)) for rank, key in keys.items() if store.check([key])
        }
        return [
            (rank, subject) for rank, (begun, _, subject) in posts.items() if begun < collectives
        ]

    def _compare(self, claim: Claim, collectives: int) -> list[Claim] | None:
        if self._group is None:
            self._group = (self._store.add("fp8core/begun", 1) - 1) // self._size
        digest = hashlib.sha256(f"{claim.waits_in}\n{claim.text}".encode()).hexdigest()
        verdict = self._meet("digest", [collectives, digest, claim.subject], claim.subject)
        claims: list[Claim] | None = None
        if verdict != _SAME:
            texts = self._meet("text", [*claim], claim.subject)
            claims = [Claim(*fields) for fields in json.loads(texts)]
        self._number += 1
        return claims

    def _prefix(self, group: int | None, number: int) -> str:
        return f"fp8core/{group}/{number}"

    def _meet(self, phase: str, post: list[object], subject: str) -> str:
        """Write the post of this rank to the store, and return the verdict: the posts of all ranks
        as a list in JSON, or :data:`_SAME` for equal digests."""
        prefix = f"{self._prefix(self._group, self._number)}/{phase}"
        store, verdict = self._store, f"{prefix}/verdict"
        store.set(f"{prefix}/{self._rank}", json.dumps(post))
        if store.add(f"{prefix}/count", 1) < self._size:
            self._wait(prefix, subject)
            said: bytes = store.get(verdict)
            return said.decode()
        keys = [f"{prefix}/{rank}" for rank in range(self._size)]
        posts = [json.loads(store.get(key)) for key in keys]
        is_same = phase == "digest" and all(digest[1] == posts[0][1] for digest in posts)
        outcome = _SAME if is_same else json.dumps(posts)
        store.set(verdict, outcome)
        for key in (*keys, f"{prefix}/count"):
            store.delete_key(key)
        if self._number:  # all ranks are in this comparison, so have read the verdict of the last
            before = self._prefix(self._group, self._number - 1)
            store.delete_key(f"{before}/{phase}/verdict")
        return outcome

    def _wait(self, prefix: str, subject: str) -> None:
        end, pause = time.monotonic() + self._timeout_s, _FIRST_PAUSE_S
        while not self._store.check([f"{prefix}/verdict"]):
            if time.monotonic() > end:
                keys = {rank: f"{prefix}/{rank}" for rank in range(self._size)}
                missing = [rank for rank, key in keys.items() if not self._store.check([key])]
                raise CollectiveError(
                    f"rank {self._rank} compares {subject} with the other ranks of its group, and "
                    f"ranks {missing} did not take part within {self._timeout_s:g} s, the timeout "
                    f"of the group (init_process_group(timeout=...), new_group(timeout=...)). Look "
                    f"for a rank that raised an error, ended, or took another path through the "
                    f"model."
                )
            time.sleep(pause)
            pause = min(1.5 * pause, _LONGEST_PAUSE_S)
