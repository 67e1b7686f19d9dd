"""Ranks compare texts by way of the key-value store of their group, and not by a collective.

A rank that compares waits for the others here. So it does not disturb a rank that has nothing to
compare and waits in a collective, and that rank can see why the collective does not end::

    rank 0, still in its step               rank 1, whose recipe has changed
    -------------------------------------   ------------------------------------------
    gather ... does not end                 posts its claim: 17 collectives so far, text
    looks into the store: rank 1 compares,  waits for the claims of all
    and has not begun the 18th collective
    posts its own claim
    both raise what they have claimed

A comparison has two phases: of digests, and, where those differ, of the texts. The rank whose claim
is the last one reads all of them and posts the verdict, so that the others read one key. Claims
that differ are an error on every rank, which :func:`difference` words.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from fp8core.errors import CollectiveError, Fp8CoreError, OperandError

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 2e-4, 2e-2
_SAME = "same"
_MOST_TIMES = 3


class Store(Protocol):
    """The part of ``torch.distributed.Store`` that comparisons use."""

    def set(self, key: str, value: str, /) -> None: ...  # noqa: D102
    def get(self, key: str, /) -> bytes: ...  # noqa: D102
    def add(self, key: str, amount: int, /) -> int: ...  # noqa: D102
    def check(self, keys: list[str], /) -> bool: ...  # noqa: D102
    def delete_key(self, key: str, /) -> bool: ...  # noqa: D102


class Claim(NamedTuple):
    """The claim of a rank: ``text`` describes ``subject``.

    ``waits_in`` is the collective that the rank waits in, "" if it compares.
    """

    subject: str
    text: str
    waits_in: str = ""


class Comparisons:
    """The comparisons of one rank with the others of a group of ``size`` ranks, in order.

    ``timeout_s`` is how long a rank waits for the others.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_s: float) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._timeout_s = timeout_s
        self._number = 0
        # A group may have the name, and the keys, of one that was destroyed: each has a number,
        # which follows from how many ranks have begun their first comparison.
        self._group: int | None = None

    def compare(self, claim: Claim, collectives: int) -> list[Claim] | None:
        """Return the claims of all ranks if they differ, None if they do not.

        ``collectives`` is how many collectives this rank has begun.

        Raises:
            CollectiveError: a rank did not compare anything before the timeout, or the store is
                gone, as where the process that holds it has ended.
        """
        try:
            return self._compare(claim, collectives)
        except CollectiveError:
            raise
        except RuntimeError as error:
            stage = f"comparison of {claim.subject} by rank {self._rank}"
            raise CollectiveError.of(stage, error) from None

    def parted(self, collectives: int, claim: Callable[[str], Claim]) -> list[Claim] | None:
        """Return the claims of all ranks if one compares that has not begun the collective in which
        this rank waits, its number ``collectives``; None if there is no such rank.

        ``claim(subject)`` is what this rank says about what is compared then.
        """
        if self._group is None:
            begun = self._store.add("fp8core/begun", 0)
            if not begun % self._size:
                return None
            prefix = self._prefix(begun // self._size, 0)
        else:
            prefix = self._prefix(self._group, self._number)
        posts = [f"{prefix}/digest/{rank}" for rank in range(self._size) if rank != self._rank]
        if not self._store.check([f"{prefix}/digest/count"]):
            return None
        posted = [json.loads(self._store.get(key)) for key in posts if self._store.check([key])]
        subjects = [subject for begun, _, subject in posted if begun < collectives]
        return self.compare(claim(subjects[0]), collectives) if subjects else None

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
        """Post what this rank says, and return the verdict: all posts as a list in JSON, or that
        their digests are the same."""
        prefix = f"{self._prefix(self._group, self._number)}/{phase}"
        store, verdict = self._store, f"{prefix}/verdict"
        store.set(f"{prefix}/{self._rank}", json.dumps(post))
        if store.add(f"{prefix}/count", 1) < self._size:
            self._wait(prefix, subject)
            return store.get(verdict).decode()
        keys = [f"{prefix}/{rank}" for rank in range(self._size)]
        posts = [json.loads(store.get(key)) for key in keys]
        is_same = phase == "digest" and all(digest[1] == posts[0][1] for digest in posts)
        judged = _SAME if is_same else json.dumps(posts)
        store.set(verdict, judged)
        for key in (*keys, f"{prefix}/count"):
            store.delete_key(key)
        if self._number:  # all ranks are here, so all have read that verdict
            before = self._prefix(self._group, self._number - 1)
            store.delete_key(f"{before}/{phase}/verdict")
        return judged

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


def joined(properties: Mapping[str, str]) -> str:
    """Return the text that ranks compare of ``properties``, without those that are empty.

    >>> joined({"": "first", "dtype": "torch.float32", "mode": ""})
    'first. dtype: torch.float32'
    """
    texts = ((f"{name}: " if name else "") + text for name, text in properties.items() if text)
    return ". ".join(texts)


class Comparing(Protocol):
    """The part of :class:`fp8core.collectives.Communicator` that an :class:`Agreement` uses."""

    def agree(self, text: str, subject: str) -> None: ...  # noqa: D102


class Agreement:
    """Comparisons that a layer has made with the other ranks, by the keys of its bound links.

    Ranks compare again where a layer changes to other links, which it may have run before: the
    first three times of each change, so that a loop that alternates does not pay in each step.
    """

    __slots__ = ("_changes", "_texts")

    def __init__(self) -> None:
        self._texts: dict[object, tuple[str, Sequence[Comparing]]] = {}
        self._changes: Counter[tuple[str, str]] = Counter()

    def is_known(self, key: object) -> bool:
        """Say whether the layer has compared the links bound by ``key``."""
        return key in self._texts

    def add(self, key: object, text: str, communicators: Sequence[Comparing]) -> None:
        """Note that the ranks of ``communicators`` have agreed on ``text`` for the links of
        ``key``."""
        self._texts[key] = text, communicators

    def change(self, subject: str, before: object, after: object) -> None:
        """Compare a change from the links bound by one key to those of another.

        Raises:
            OperandError: another rank has other links; raised on every rank.
        """
        (old, _), (new, communicators) = self._texts[before], self._texts[after]
        self._changes[old, new] += 1
        if old == new or self._changes[old, new] > _MOST_TIMES:
            return
        for communicator in communicators:
            communicator.agree(new, subject)


def difference(claims: Sequence[Claim], rank: int, group_name: str) -> Fp8CoreError:
    """Return the error of ``rank`` for ``claims`` that differ, one a rank of the group."""
    if not any(claim.waits_in for claim in claims):
        return OperandError(_difference_text(claims[rank].subject, group_name, claims))
    subjects = dict.fromkeys(claim.subject for claim in claims if not claim.waits_in)
    text = _difference_text(" and ".join(subjects), group_name, claims)
    ended = (
        " The group cannot go on after that, as some ranks have begun a collective that the "
        "others do not call."
    )
    texts = {claim.text for claim in claims}
    return (OperandError if len(texts) > 1 else CollectiveError)(text + ended)


def _difference_text(subject: str, group_name: str, claims: Sequence[Claim]) -> str:
    """Return the message for claims that differ: each of them once, with its ranks."""
    ranks: dict[str, list[int]] = {}
    for rank, claim in enumerate(claims):
        waits = f", and waits in {claim.waits_in}" if claim.waits_in else ""
        text = claim.text
        if claim.subject != claims[0].subject:
            text = f"{claim.subject}: {text}"
        ranks.setdefault(f"{text}{waits}", []).append(rank)
    parts = (
        f"rank{'s' if len(of) > 1 else ''} {', '.join(map(str, of))}: {text}"
        for text, of in ranks.items()
    )
    return (
        f"the ranks of group {group_name!r} differ in {subject}. " + "; ".join(parts) + ". Every "
        "rank of the group has to run the same layers by the same recipe, in the same order, on "
        "inputs of the same sizes, with gradients of the same tensors."
    )
