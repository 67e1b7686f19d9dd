"""The state that calls of a layer share: its bound links by recipe, device, dtype and policy, and
the memo of the last call.

A memo says on what a call depended, and what repeats it. A layer alone, attention, and the layers
of a Transformer layer as one chain note their last call in the same way. A call that differs from
it in nothing that is listed here is its replay: it is neither checked nor bound, and computes the
same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_, methodcaller
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import torch

from fp8core.chain.run import Prepared
from fp8core.chain.shape import Watch
from fp8core.context import recompute
from fp8core.context.autocast import Active, active
from fp8core.context.scopes import touch_all
from fp8core.dispatch import policy
from fp8core.dispatch.policy import Policy
from fp8core.modules.agreement import Agreement
from fp8core.recipe import Recipe
from fp8core.tensors.delayed_state import DelayedState, LayerStates, Order, new_order
from fp8core.tensors.weights import WeightStore
from fp8core.torch_ops.capture import is_faked
from fp8core.torch_ops.nonfinite import new_counter
from fp8core.torch_ops.private import (
    NO_BACKWARD_PASS,
    WATCHERS,
    current_backward_pass,
    forward_mode_level,
    has_global_hooks,
    is_traced,
    is_transform_active,
)
from fp8core.torch_ops.repeats import Likeness


class Witnesses(NamedTuple):
    """Modules as they were in a call, whose attributes are compared in a few calls, whatever their
    number.

    Attributes:
        equal: returns the attributes of :func:`_compared`, by value: what decides how each runs,
            its ``call_fields`` and ``shape_fields``; of a module of another library whether it
            trains.
        values: what they were.
        same: returns those that are compared by identity.
        objects: what they were.
    """

    equal: Callable[[Any], tuple[Any, ...]]
    values: tuple[Any, ...]
    same: Callable[[Any], tuple[Any, ...]]
    objects: tuple[Any, ...]

    @classmethod
    def of(cls, root: object, modules: Mapping[str, Any]) -> Witnesses:
        """Return ``modules`` as they are now, which lie in ``root`` by these prefixes."""
        values, objects = [], []
        for prefix, module in modules.items():
            by_value, by_identity = _compared(module, is_called=not prefix)
            values += [prefix + name for name in by_value]
            objects += [prefix + name for name in by_identity]
        equal, same = attrgetter(*values), attrgetter(*objects)
        # Dictionaries of modules and hooks go on changing.
        copies = [dict(each) if isinstance(each, dict) else each for each in equal(root)]
        return cls(equal, tuple(copies), same, same(root))

    def are_in(self, root: Any) -> bool:
        """Return whether the modules in ``root`` are as they were."""
        try:
            return self.equal(root) == self.values and all(map(is_, self.same(root), self.objects))
        except AttributeError:  # of another class by now
            return False


def _compared(module: Any, *, is_called: bool) -> tuple[Sequence[str], Sequence[str]]:
    """Return the names of a module's attributes that are compared by value, and by identity.

    By value: the modules within, by name; what else runs in a call, but of the module that is
    called, which has run already. By identity: its own dictionary of parameters, which a shallow
    copy of the module may replace; of a layer in low precision the key and the links that it was
    bound to, and the weights of the scope of frozen weights that was open, None if none was.
    """
    fields = getattr(module, "call_fields", ("training",))
    fields = *fields, *getattr(module, "shape_fields", ())
    bindings = getattr(module, "_bindings", None)
    is_bound = bindings is not None and bindings.last is not None
    bound = ("_bindings.last", "_bindings.weights.scope") if is_bound else ()
    watchers = () if is_called else WATCHERS
    return (*fields, "_modules", *watchers), ("__class__", "_parameters", *bound)


_has_forward: Callable[[dict[str, Any]], bool] = methodcaller("__contains__", "forward")


Sources: TypeAlias = "Sequence[tuple[dict[str, Any] | None, Sequence[str]]]"
"""Where each parameter of a chain lies: a module's ``_parameters``, and its name there, or those of
its parts along their first dimension. None instead of a module's: the tensor that calls bring."""


class Memo(NamedTuple):
    """The last call, and how it ran.

    Attributes:
        arguments: those besides the tensors that it computed from; equal ones say the same.
        witness: the module that is called, which its own memo would keep alive.
        beside: the modules besides that take part, and what holds them; None without any.
        forwards: the dictionaries of these, in which a forward of their own would be.
        outside: what the layer computes outside any autocast.
        request: what was active.
        backends: those that the program named.
        has_grad: whether gradients were enabled.
        sources: where the parameters lie; None where calls bring them.
        num_params: how many there were.
        shape: the input's; None where other sizes run alike.
        is_like, address, run: as of :class:`~fp8core.chain.run.Prepared`.
        states: the forward and backward states in which it recorded.
    """

    arguments: object
    witness: Witnesses
    beside: tuple[Witnesses, object] | None
    forwards: Sequence[dict[str, Any]]
    outside: Active | None
    request: Active
    backends: Policy
    has_grad: bool
    sources: Sources | None
    num_params: int
    shape: torch.Size | None
    is_like: Likeness
    address: Callable[[torch.Tensor], int]
    run: Callable[..., torch.Tensor | None]
    states: Sequence[tuple[DelayedState, DelayedState]]


def memo_of(
    layers: Sequence[Any],
    outside: Active | None,
    prepared: Prepared,
    num_params: int,
    states: Sequence[LayerStates | None],
    *,
    arguments: object = (),
    sources: Sources | None = None,
    shape: torch.Size | None = None,
) -> Memo | None:
    """Return the memo of the call that has just run, None if it repeated another.

    ``layers`` are the module that was called and the others that took part; ``states`` those of
    delayed scaling. The other arguments are the attributes of a :class:`Memo`.
    """
    if recompute.current() is not None or recompute.is_in_backward() or is_faked():
        return None
    request, has_grad = active(outside), torch.is_grad_enabled()
    called, *rest = layers
    if any([getattr(module, name) for module in rest for name in WATCHERS]):
        return None
    beside: tuple[Witnesses, object] | None = None
    if rest:
        names = {f"m{at}": module for at, module in enumerate(rest)}
        root = SimpleNamespace(**names)
        beside = Witnesses.of(root, {f"{name}.": module for name, module in names.items()}), root
    records = has_grad or request.observe is not None
    recorded = [(each.forward, each.backward) for each in states if each is not None and records]
    return Memo(
        arguments,
        Witnesses.of(called, {"": called}),
        beside,
        [vars(module) for module in rest],
        outside,
        request,
        policy.current(),
        has_grad,
        sources,
        num_params,
        shape,
        *prepared,
        recorded,
    )


def sources_of(layers: Sequence[Any]) -> Sources | None:
    """Return where the parameters of ``layers`` in low precision lie; None if one is computed, as
    by a parametrization, or is a part of a parameter."""
    sources: list[tuple[dict[str, Any] | None, Sequence[str]]] = []
    for layer in layers:
        stored, parameters = layer._parameters, layer.link_names()
        if parameters is None or layer.local_part is not None:
            return None
        for names in parameters:
            if not stored.keys() >= {*names}:
                return None
            sources.append((stored, names))
    return sources


def replay(
    layer: torch.nn.Module,
    memo: Memo,
    input: torch.Tensor,
    params: Sequence[Any] | None = None,
    arguments: object = (),
    brought: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Run ``layer`` on ``input`` as in the call of ``memo``; None if this call is another.

    Whatever a call depends on is compared: here, or in ``is_like`` at once. ``params`` None: the
    layers' own, and the tensor that is ``brought``. Nothing of ``input`` is read before its type is
    compared.
    """
    if memo.arguments != arguments:
        return None
    request, backends = active(memo.outside), policy.current()
    if (
        request is not memo.request
        or (backends is not memo.backends and backends != memo.backends)
        or recompute.current() is not None
        or current_backward_pass() != NO_BACKWARD_PASS
        or torch.is_grad_enabled() is not memo.has_grad
        or is_transform_active()
        or is_traced()
        or forward_mode_level() >= 0
        or not memo.witness.are_in(layer)
    ):
        return None
    if memo.beside is not None:
        witnesses, root = memo.beside
        if has_global_hooks() or not witnesses.are_in(root):
            return None
        if True in map(_has_forward, memo.forwards):
            return None
    if params is None:
        if memo.sources is None:
            return None
        params = []
        try:
            for stored, names in memo.sources:
                if stored is None:
                    if brought is None:
                        return None
                    params += (brought,)
                    continue
                param = stored[names[0]]
                if names[1:]:
                    param = torch.cat([*map(stored.__getitem__, names)])
                params += (param,)
        except KeyError:  # computed by a parametrization, or a view of a flat parameter
            return None
    if (
        len(params) != memo.num_params
        or not memo.is_like(input, *params)
        or (memo.shape is not None and input.shape != memo.shape)
        or not input.data_ptr()
        or not all(map(memo.address, params))
    ):
        return None
    if memo.states:
        touch_all(memo.states, request.group)
    return memo.run(input, *params)


bind_lock = threading.RLock()
"""Held while a layer is bound: two threads that use it for the first time must not each create its
delayed state."""


class Bindings:
    """A layer's bound links by key, and the delayed states, weights and counters they use.

    A copy of the layer starts with an empty one, as everything here refers to the tensors of one
    layer. ``table`` holds the links bound for ``watch``, which is None in most layers, and ``last``
    the key and the links of the last call. Those bound without a watch are set aside while there is
    one, and run again afterwards.
    ``agreement`` is what the ranks have compared, of a layer over ranks.
    ``memo`` is that of the last call that may be repeated. ``recipe`` is the class of the last
    recipe in low precision.
    """

    __slots__ = (
        *("_unwatched", "agreement", "has_uncounted", "is_counted", "last", "memo", "nonfinite"),
        *("order", "recipe", "states", "table", "watch", "weights"),
    )

    def __init__(self, order: Order | None = None, watch: Watch | None = None) -> None:
        # Ranks create their layers in the same order, whatever order they first run them in.
        self.order = new_order() if order is None else order
        self.table: dict[tuple[object, ...], Any] = {}
        self.agreement = Agreement()
        self.last: tuple[tuple[object, ...], Any] | None = None
        self.memo: Memo | None = None
        self.recipe: type[Recipe] | None = None
        self.states: dict[object, LayerStates] = {}
        self.weights = WeightStore()
        self.watch = watch
        self._unwatched: tuple[Any, Any] = ({}, None)
        # Whether NaN and inf are counted, and whether casts were bound before that; how many the
        # layer's casts have met, by device.
        self.is_counted = self.has_uncounted = False
        self.nonfinite: dict[torch.device, torch.Tensor] = {}

    def fresh(self) -> Bindings:
        """Return one without links, under the same watch and with the same counters."""
        empty = Bindings(self.order, self.watch)
        empty.is_counted, empty.has_uncounted = self.is_counted, self.has_uncounted
        empty.nonfinite = self.nonfinite
        return empty

    def count(self) -> None:
        """Have the layer's casts count NaN and inf; those bound without a count are bound again."""
        if self.is_counted:
            return
        self.is_counted, self.has_uncounted = True, False
        # The keys stay: what the ranks have compared they do not compare again.
        self.table, self.last, self.memo = dict.fromkeys(self.table), None, None
        self._unwatched = (dict.fromkeys(self._unwatched[0]), None)

    def nonfinite_of(self, device: torch.device, *, is_training: bool) -> torch.Tensor | None:
        """Return the int64 ``[1]`` in which the layer's casts on ``device`` count NaN and inf.

        It is entry 0 of the stored counter for calls that record gradients (``is_training``), and
        entry 1 for the others: an evaluation between two steps is no part of a step. None on meta
        and under FakeTensorMode, and where nobody has asked for a count. Called where a layer is
        bound, see :func:`fp8core.torch_ops.capture.in_plain_mode`.
        """
        if device.type == "meta" or not self.is_counted or is_faked():
            return None
        if device not in self.nonfinite:
            self.nonfinite[device] = new_counter(device)
        return self.nonfinite[device].narrow(0, 0 if is_training else 1, 1)

    def set_watch(self, watch: Watch | None) -> None:
        """Have the layer bind its links for ``watch``; None restores the links without one."""
        if watch is self.watch:
            return
        if self.watch is None:
            self._unwatched = (self.table, self.last)
        self.table, self.last = ({}, None) if watch is not None else self._unwatched
        self.watch = watch

    def __reduce__(self) -> tuple[type[Bindings], tuple[()]]:
        return Bindings, ()

    def __deepcopy__(self, memo: object) -> Bindings:
        return Bindings(new_order(self.order))
