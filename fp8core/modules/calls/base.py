"""The base of fp8core's layers: the shapes of its chain, its parameters and its name."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import torch
from torch.nn.utils import parametrize
from typing_extensions import override

from fp8core.chain.delayed_wgrad import WgradQueue
from fp8core.chain.shape import LinkShape, Watch
from fp8core.context.autocast import Active
from fp8core.errors import OperandError, UnsupportedError
from fp8core.modules.calls.bound import Bound, label_of, recipe_in
from fp8core.modules.calls.parameters import materialize, resolve_device
from fp8core.modules.memo import bind_lock
from fp8core.modules.siblings import Siblings
from fp8core.modules.state.delayed import DelayedModule
from fp8core.recipe.plan import LayerRole, LinearPlan


def last_run(last: tuple[Any, Any] | None, kind: str, name: str | None) -> list[str]:
    """Return the recipe and the backends of a layer's last call, as one item; none before it.

    ``last`` is the layer's last entry in its :class:`~fp8core.modules.memo.Bindings`.
    """
    if last is None:
        return []
    bound: Bound = last[1]
    chosen = recipe_in(bound.recipe, LayerRole(kind, name))
    ran = [choice for link in bound.linears for choice in link.choices.values()]
    if isinstance(bound.plan, LinearPlan):
        is_low = not ran or any(choice.desc.low_precision for choice in ran)
        is_low = is_low or bool(bound.plan.makers)
    else:
        is_low = not bound.plan.is_high_precision
    recipe = type(chosen).__name__ if chosen is not None and is_low else "high precision"
    backends = dict.fromkeys(link.choices["fprop"].backend for link in bound.linears)
    return [f"last run: {' '.join([recipe, *(f'on {backend}' for backend in backends)])}"]


class LowPrecisionModule(DelayedModule):
    """Base of the layers. A subclass names its ``kind`` and returns the shapes of its chain.

    A ``forward`` checks its input (:func:`fp8core.modules.calls.inputs.check_input`), binds the
    layer to the active recipe (:func:`fp8core.modules.calls.bind.bind`) and runs the links that it
    gets (:func:`fp8core.modules.run.run_links`).
    """

    kind: ClassVar[str]
    # The attributes that decide how a call runs, besides what the layer is bound to.
    call_fields: ClassVar[tuple[str, ...]] = (
        *("training", "outside_autocast", "local_part", "wgrad_queue", "has_static_scales"),
    )
    # The attributes that decide about the shapes: the layer is bound anew where one has changed.
    shape_fields: ClassVar[tuple[str, ...]] = ()
    use_bias: bool
    fuse_wgrad_accumulation = False
    # How many groups of a grouped layer compute each token.
    groups_per_token = 1
    # Whether delayed scales stay as they are, also where gradients are on.
    has_static_scales = False
    # The recipe for calls outside any autocast; high precision if None.
    outside_autocast: Active | None = None
    # The weight gradients that backward left to backward_dw; None for a layer that delays none.
    wgrad_queue: WgradQueue | None = None
    # Returns what this rank has of a parameter that a style spread over ranks, given its name and
    # the parameter; None for a layer whose parameters are whole.
    local_part: Callable[[str, torch.Tensor | None], torch.Tensor | None] | None = None
    # Finds the layers that are called with the same input; None for one whose input is its own.
    siblings: Siblings | None = None
    # Kind and name of each layer of the prepared model, one a line; a single text, which
    # torch.compile compares at once.
    peers: str = ""

    def __init__(self, name: str | None = None) -> None:
        super().__init__()
        self.name = name
        self._wgrad_hooks: list[Callable[[], object]] = []

    def link_shapes(self) -> tuple[LinkShape, ...]:
        """Return the shapes of the layer's chain, which do not depend on its recipe; none for a
        layer of a user that computes without one."""
        return ()

    def shape_values(self) -> tuple[object, ...]:
        """Return the values of ``shape_fields``, which a caller may have set since the last
        call."""
        return tuple([getattr(self, name) for name in self.shape_fields])

    def link_names(self) -> list[tuple[str, ...]] | None:
        """Return the names of the chain's parameters, in order; a parameter that is put together
        of several along their first dimension has several. None where :meth:`link_params` computes
        them otherwise."""
        return None

    def link_params(self) -> list[torch.Tensor]:
        """Return the chain's parameters, in order."""
        stored = self._parameters if self.local_part is None else {}
        params = []
        for names in self.link_names() or ():
            # Most are stored: without a call.
            is_stored = len(names) == 1 and names[0] in stored
            param = stored[names[0]] if is_stored else self.put_together(names)
            if param is not None:
                params.append(param)
        return params

    def put_together(self, names: Sequence[str]) -> torch.Tensor | None:
        """Return the parameter of that name, or several along their first dimension; None if the
        layer has None there."""
        if len(names) == 1:
            return self.parameter(names[0])
        parts = [self.parameter(name) for name in names]
        return None if parts[0] is None else torch.cat([part for part in parts if part is not None])

    @property
    def is_link(self) -> bool:
        """Whether an ``ops.Sequential`` runs it as a part of a chain, instead of by itself."""
        return True

    @property
    def is_whole_chain(self) -> bool:
        """Whether :meth:`link_shapes` are the links of one chain, from its input to its output."""
        return True

    def runs_alone(self) -> Collection[str]:
        """Return the names of the modules inside that run by themselves, not in its chain."""
        return ()

    def weight_names(self) -> list[tuple[str, ...]]:
        """Return the names of the parameters that are the weight of each GEMM, in its order.

        A GEMM has several names where its weight is quantized as one tensor of several parameters.
        """
        if not any(shape.num_weights for shape in self.link_shapes()):
            return []
        parameters = self._parameters.items()
        return [
            (name,)
            for name, parameter in parameters
            if parameter is not None and parameter.dim() > 1
        ]

    def linear_shapes(self) -> list[LinkShape]:
        """Return the shapes of the chain's linears: the links that have weights."""
        return [shape for shape in self.link_shapes() if shape.num_weights]

    @override
    def count_slot_sets(self) -> int:
        return sum(shape.num_weights for shape in self.link_shapes())

    def need_backward_dw(self) -> bool:
        """Return whether the layer has ``delay_wgrad_compute``."""
        return self.wgrad_queue is not None

    def backward_dw(self) -> None:
        """Compute the weight gradients that a backward pass left, those of the first pass first.

        The gradients are added to ``grad``, or to ``main_grad`` with ``fuse_wgrad_accumulation``,
        and hooks of the parameters run as in backward. Call it once for each backward pass through
        the layer. Does nothing without ``delay_wgrad_compute``, or if no weight is trained.

        Raises:
            OperandError: no backward pass has left any; or ``main_grad`` does not fit, and the call
                may then be repeated.
            UnsupportedError: the layer has other parameters than it had in forward.
        """
        queue = self.wgrad_queue
        if queue is None:
            return
        if not len(queue):
            if any(parameter.requires_grad for parameter in self._weights()):
                raise OperandError(
                    f"{self.label}: backward_dw() without a backward pass through the layer since "
                    f"the last one. Call it once after each, on what was called: for an operation "
                    f"in an ops.Sequential, on that."
                )
            return
        parameters = {id(parameter) for parameter in self.parameters()}
        for pending in queue.first():
            if any(weight.is_leaf and id(weight) not in parameters for weight in pending.weights):
                raise UnsupportedError(
                    f"{self.label}: backward_dw() after the parameters of forward were replaced, "
                    f"as FSDP does after backward: their gradients would reach nobody. Leave out "
                    f"delay_wgrad_compute."
                )
        queue.compute_first()
        for hook in self._wgrad_hooks:
            hook()

    def register_wgrad_accumulation_and_reduce_hooks(
        self, wgrad_accumulation_and_reduce_hook: Callable[[], object]
    ) -> None:
        """Have :meth:`backward_dw` call the hook at its end, as frameworks do that reduce the
        gradients of weights with ``skip_backward_post_hook``."""
        self._wgrad_hooks.append(wgrad_accumulation_and_reduce_hook)

    def _delay_wgrads(self) -> None:
        """Have backward leave the gradients of the layer's weights to :meth:`backward_dw`."""
        self.wgrad_queue = WgradQueue()
        for weight in self._weights():
            weight.skip_backward_post_hook = True  # type: ignore[attr-defined]  # Megatron reads it

    def _weights(self) -> list[torch.Tensor]:
        """Return the parameters that are matrices."""
        return [parameter for parameter in self.parameters() if parameter.dim() > 1]

    def set_watch(self, watch: Watch | None) -> None:
        """Have ``watch`` observe the tensors that the layer's linears compute with; None ends it.

        The layer then runs the links that ``watch`` puts in their stead, and afterwards the same
        objects as before. Quantized weights and delayed scales stay as they are.
        """
        with bind_lock:
            self._bindings.set_watch(watch)

    def count_nonfinite(self) -> None:
        """Have the layer's casts count NaN and inf, in calls that begin from now on.

        Quantized weights and delayed scales stay as they are.
        """
        with bind_lock:
            self._bindings.count()

    def parameter(self, name: str) -> torch.Tensor | None:
        """Return the parameter ``name``, or the tensor in its stead: the result of a
        parametrization, a view of a flat parameter, or this rank's part of a spread parameter."""
        try:
            value = self._parameters[name]
            return value if self.local_part is None else self.local_part(name, value)
        except KeyError:
            computed: torch.Tensor | None = getattr(self, name)
            return computed

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of the parameter ``name``, or of the tensor in its stead.

        A parametrization is not computed for that, as it may draw random numbers or write to its
        buffers. torch refuses a parametrization that changes the dtype, unless it is registered as
        unsafe.
        """
        parameter = self._parameters.get(name)
        if parameter is not None:
            return parameter.dtype
        if parametrize.is_parametrized(self, name):
            parametrized: Any = self.parametrizations[name]  # type: ignore[index]  # torch's ModuleDict
            for original in parametrized.parameters(recurse=False):
                dtype: torch.dtype = original.dtype
                return dtype
        computed: torch.Tensor = getattr(self, name)
        return computed.dtype

    def reset_parameters(self, defer_init: bool = False) -> None:
        """Fill the parameters with their first values, and forget the delayed state.

        Parameters on meta first get memory, on torch's default device if one was set, else on the
        selected backend's. Nothing is filled where that is meta, or with ``defer_init``. A tensor
        that a parametrization computes stays as it is.
        """
        if defer_init:
            return
        if any(
            parameter is not None and parameter.is_meta for parameter in self._parameters.values()
        ):
            materialize(self, resolve_device(None))
        self.reset_delayed_state()
        self._fill_parameters()

    def _fill_parameters(self) -> None:
        """Give each of the layer's parameters, not those of its children, its first value."""

    @property
    def label(self) -> str:
        """The layer's name in messages: its name in the model, else its class and sizes."""
        return label_of(type(self).__name__, self.name, self.link_shapes())

    def extra_repr(self) -> str:
        """Return sizes, dtype, and how the layer last ran."""
        words = self._describe()
        for parameter in itertools.islice(self.parameters(), 1):
            words.append(f"dtype={str(parameter.dtype).removeprefix('torch.')}")
        return ", ".join([*words, *last_run(self._bindings.last, self.kind, self.name)])

    def _describe(self) -> list[str]:
        """Return the sizes and options that :meth:`extra_repr` shows."""
        shape = self.linear_shapes()[0]
        assert shape.features is not None
        in_features, out_features = shape.features
        words = [f"num_gemms={shape.groups}"] if shape.groups else []
        return [
            *words,
            f"in_features={in_features}",
            f"out_features={out_features}",
            f"bias={self.use_bias}",
        ]
