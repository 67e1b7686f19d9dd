"""What a bound callable offers besides its call: looked for once, and checked, as it is bound."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from fp8core.backend_api import (
    Backend,
    OpDesc,
    Quantized,
    QuantizeDesc,
    RecordsFunctions,
    ScaleUpdateDesc,
)
from fp8core.backend_api.optional import (
    MovesBeside,
    NamesKernel,
    NamesOtherKernels,
    PairCast,
    PreparesUpdates,
    QuantizesPairs,
    Ranks,
    Recorder,
    RecordsCalls,
    TakesMaxima,
    Transfers,
)
from fp8core.dispatch.isolation import Failure, attempt, shown
from fp8core.errors import PluginError

__all__ = ["Offers", "offers_of", "pair_of", "recorder_of", "transfers_of"]


class Offers(NamedTuple):
    """The members of the protocols in :mod:`fp8core.backend_api.optional` that one bound callable
    has, None for each that it does not have; and the backend's recorder of its calls."""

    bind_pair: Callable[[Callable[..., Quantized]], PairCast | None] | None = None
    prepare: Callable[..., Callable[[], None]] | None = None
    kernel: str | None = None
    other_kernels: tuple[tuple[str, str], ...] = ()
    recorder: Recorder | None = None


class _Method(NamedTuple):
    """An optional method and the call of it that has to be possible."""

    name: str
    protocol: type
    positional: Sequence[str]
    keywords: Sequence[str] = ()

    def __str__(self) -> str:
        keywords = ["*", *self.keywords] if self.keywords else []
        return f"{self.name}({', '.join([*self.positional, *keywords])})"


def offers_of(run: Callable[..., Any], desc: OpDesc, who: str) -> Offers:
    """Return what ``run`` offers, the callable that ``who`` has bound for ``desc``.

    Raises:
        PluginError: a member of it is not what its protocol says; the text has both.
    """
    found: dict[str, Any] = {}
    for method in _methods(desc):
        offered = _member(run, method.name, who)
        if offered is not None:
            _check(offered, method, who)
            found[method.name] = offered
    kernel = _member(run, "kernel", who)
    if kernel is not None and not isinstance(kernel, str):
        raise PluginError(
            f"{who} has kernel={shown(kernel)}; expected a text, the name of what runs on the "
            f"device ({_name_of(NamesKernel)})"
        )
    others = _member(run, "other_kernels", who) or ()
    if not _is_text_pairs(others):
        raise PluginError(
            f"{who} has other_kernels={shown(others)}; expected pairs of texts, each the name of a "
            f"kernel that does not run and why not ({_name_of(NamesOtherKernels)})"
        )
    return Offers(**found, kernel=kernel, other_kernels=tuple(map(tuple, others)))


def _is_text_pairs(given: Any) -> bool:
    return isinstance(given, tuple | list) and all(
        isinstance(pair, tuple | list)
        and len(pair) == 2
        and all(isinstance(text, str) for text in pair)
        for pair in given
    )


def recorder_of(backend: Backend, desc: OpDesc, device: torch.device, who: str) -> Recorder | None:
    """Return what ``backend`` records calls of ``desc`` by, None if it does not.

    Raises:
        PluginError: it failed at that, or returned something that cannot record; the text says so.
    """
    if not isinstance(backend, RecordsCalls):
        return None
    offered: Any = attempt(lambda: backend.recorder(desc, device))
    if isinstance(offered, Failure):
        offered.fail(f"{who} has recorder(desc, device), which failed")
    if offered is None:
        return None
    where = f"{who} has a recorder(), whose result"
    record, call = (_member(offered, name, where) for name in ("record", "call"))
    _check(record, _Method("record", Recorder, ("run", "leading", "saved", "constants")), who)
    if call is not None:
        _check(call, _Method("call", RecordsFunctions, ("function", "tensor", "tensor")), who)
    recorder: Recorder = offered
    return recorder


def transfers_of(
    backend: Backend, ranks: Ranks, device: torch.device, who: str
) -> Transfers | None:
    """Return what ``backend`` moves rows of tensors on ``device`` between ``ranks`` by, beside its
    products; None if it does not.

    Raises:
        PluginError: it failed at that, or returned something that cannot; the text says so.
    """
    if not isinstance(backend, MovesBeside):
        return None
    offered: Any = attempt(lambda: backend.transfers(ranks, device))
    if isinstance(offered, Failure):
        offered.fail(f"{who} has transfers(ranks, device), which failed")
    if offered is None:
        return None
    where = f"{who} has transfers(), whose result"
    for method in (
        _Method("takes", Transfers, ("num_bytes",)),
        _Method("gather", Transfers, ("x",)),
        _Method("scatter", Transfers, ("size", "dtype")),
    ):
        _check(_member(offered, method.name, where), method, where)
    maximum = _member(offered, "maximum", where)
    if maximum is not None:
        _check(maximum, _Method("maximum", TakesMaxima, ("x",)), where)
    transfers: Transfers = offered
    return transfers


def pair_of(
    offers: Offers, desc: QuantizeDesc, other: Callable[..., Quantized], who: str
) -> PairCast | None:
    """Return the cast of two tensors that ``offers`` has for ``other`` as the second, if any.

    Raises:
        PluginError: it failed at that, or returned something that cannot be called as a pair is.
    """
    bind_pair = offers.bind_pair
    if bind_pair is None:
        return None
    pair = attempt(lambda: bind_pair(other))
    if isinstance(pair, Failure):
        pair.fail(f"{who} has bind_pair(other), which failed")
    if pair is None:
        return None
    _check(pair, _Method("bind_pair(other)", PairCast, ("x", "other"), _keywords(desc)), who)
    return pair


def _methods(desc: OpDesc) -> Sequence[_Method]:
    """Return the optional methods of a callable of ``desc``."""
    if isinstance(desc, ScaleUpdateDesc):
        parameters = ("histories", "scales", "targets", "nonfinite")
        return (_Method("prepare", PreparesUpdates, parameters),)
    # By given amaxes nothing but the call is defined.
    if type(desc) is not QuantizeDesc or desc.grouped:
        return ()
    if desc.rowwise is None or desc.columnwise is None:
        return ()
    return (_Method("bind_pair", QuantizesPairs, ("other",)),)


def _keywords(desc: QuantizeDesc) -> Sequence[str]:
    """Return the keywords that a cast is given in any other way than by its call."""
    is_delayed = any(spec is not None and spec.delayed for spec in (desc.rowwise, desc.columnwise))
    return (*(("scale", "amax_out") if is_delayed else ()), "nonfinite_out")


def _member(run: Callable[..., Any], name: str, who: str) -> Any:
    found = attempt(lambda: getattr(run, name, None))
    if isinstance(found, Failure):
        found.fail(f"{who} has a member {name!r}, but reading it failed")
    return found


def _check(offered: Any, method: _Method, who: str) -> None:
    """Raise PluginError unless ``offered`` takes the call that ``method`` says.

    A callable without a signature that Python can read, as compiled ones are, is taken as it is.
    """
    if not callable(offered):
        raise PluginError(_misfit(method, shown(offered), who))
    signature = attempt(lambda: _readable_signature(offered))
    if isinstance(signature, Failure):
        return
    try:
        signature.bind(*method.positional, **dict.fromkeys(method.keywords))
    except TypeError:
        raise PluginError(_misfit(method, f"{method.name}{signature}", who)) from None


def _misfit(method: _Method, found: str, who: str) -> str:
    return (
        f"{who} has an optional method that does not fit {_name_of(method.protocol)}:\n"
        f"  expected {method}\n  found    {found}"
    )


def _name_of(protocol: type) -> str:
    return f"fp8core.backend_api.{protocol.__name__}"


class _Default:
    """The default of a parameter, whose own ``repr`` may raise or be long."""

    __slots__ = ("_value",)

    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        return shown(self._value)


def _readable_signature(offered: Any) -> inspect.Signature:
    """Return the signature of ``offered`` without annotations, for a message on one line.

    Its class is Python's own: reading it runs none of the plug-in's code.
    """
    empty = inspect.Parameter.empty
    return inspect.Signature(
        [
            inspect.Parameter(
                one.name, one.kind, default=empty if one.default is empty else _Default(one.default)
            )
            for one in inspect.signature(offered).parameters.values()
        ]
    )
