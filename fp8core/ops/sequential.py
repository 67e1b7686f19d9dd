"""A container of operations, which runs consecutive operations as chains."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from typing_extensions import Self, override

from fp8core.chain.delayed_wgrad import DelayedCall, WgradQueue
from fp8core.chain.run import run_returning_input
from fp8core.chain.shape import LinkShape, input_columns_of
from fp8core.context.autocast import active
from fp8core.errors import OperandError, UnsupportedError, elsewhere
from fp8core.modules.calls.base import LowPrecisionModule
from fp8core.modules.calls.bind import bind
from fp8core.modules.calls.inputs import (
    cast_to_weight,
    check_chained,
    check_input,
    check_kind,
    takes_keyword,
)
from fp8core.modules.layers.operation import ExtraTensors, MakeExtraOutput
from fp8core.modules.run import delaying, run_layer, run_links
from fp8core.ops.basic_operation import fused, has_fusions, parts_of

Key: TypeAlias = "torch.nn.Module | int"


class _Chain(NamedTuple):
    """Operations that run as one chain, the first of whose GEMMs is ``first_gemm`` of all."""

    operations: tuple[LowPrecisionModule, ...]
    first_gemm: int

    @property
    def returns_input(self) -> bool:
        """Whether the input is an extra output."""
        return isinstance(self.operations[0], MakeExtraOutput)

    @property
    def shapes(self) -> tuple[LinkShape, ...]:
        return tuple(shape for operation in self.operations for shape in operation.link_shapes())

    @property
    def like(self) -> torch.Tensor | None:
        """The first parameter."""
        params = (param for operation in self.operations for param in operation.parameters())
        return next(params, None)


class Sequential(LowPrecisionModule):
    """Runs its modules in order; consecutive operations and layers are one chain.

    A container as ``torch.nn.Sequential``: constructed from modules, or a dict of modules, and
    indexed, sliced, changed and iterated like a list. A torch module, a :class:`BasicOperation`,
    and an operation that changes leading dimensions run by themselves, between two chains.
    Operations of another parameter dtype begin a chain too, whose input is cast to it; a norm or a
    bias in float32 stays in a chain that has begun. A Sequential inside another is part of its
    chain; an inner Sequential that is no single chain runs by itself.

    The call takes the input, then the extra inputs of all operations in order, and returns the
    output, followed by the extra outputs if there are any. The outermost Sequential holds the
    delayed-scaling state of the linears in its chains; layers that run by themselves hold theirs.

    Raises:
        OperandError: an argument is no module, the sizes of two operations do not fit, or a call
            has the wrong number of extra inputs.
        UnsupportedError: a layer returns more than one tensor.
    """

    kind = "sequential"
    _is_checked = False

    def __init__(
        self,
        *operations: torch.nn.Module | Mapping[str, torch.nn.Module],
        name: str | None = None,
    ) -> None:
        super().__init__(name)
        if len(operations) == 1 and isinstance(operations[0], Mapping):
            for key, module in operations[0].items():
                self.add_module(key, module)
        else:
            for operation in operations:
                self.append(operation)  # type: ignore[arg-type]  # add_module looks at each
        self._check()

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        """Add ``module`` at the end, as ``name``."""
        if not isinstance(module, torch.nn.Module):
            raise OperandError(
                f"ops.Sequential: operation {len(self._modules)} is {type(module).__name__}; "
                f"expected a torch.nn.Module, as the operations of fp8core.ops are."
            )
        super().add_module(name, module)
        self._changed()

    def append(self, module: torch.nn.Module) -> Self:
        """Add ``module`` at the end; return the container."""
        numbers = [int(key) for key in self._modules if key.isdecimal()]
        self.add_module(str(max(numbers, default=-1) + 1), module)
        return self

    def extend(self, modules: Iterable[torch.nn.Module]) -> Self:
        """Add ``modules`` at the end; return the container."""
        for module in list(modules):
            self.append(module)
        return self

    def insert(self, idx: int, module: torch.nn.Module) -> Self:
        """Add ``module`` before the one at ``idx``; return the container."""
        modules = list(self)
        modules.insert(idx, module)
        self.append(module)  # which looks at it
        self._modules.update(zip(self._modules, modules, strict=True))
        self._changed()
        return self

    def pop(self, idx: int | slice) -> torch.nn.Module:
        """Remove and return the module at ``idx``, or a Sequential of those of a slice."""
        removed: torch.nn.Module = self[idx]
        del self[idx]
        return removed

    def __getitem__(self, index: int | slice) -> Any:
        keys = self._keys_at(index)
        if isinstance(index, slice):
            return Sequential().extend(self._at(key) for key in keys)
        return self._at(keys[0])

    def __setitem__(self, index: int, module: torch.nn.Module) -> None:
        (key,) = self._keys_at(index)
        if not isinstance(module, torch.nn.Module):
            raise OperandError(f"ops.Sequential: {type(module).__name__} is no torch.nn.Module.")
        self._modules[key] = module
        self._changed()

    def __delitem__(self, index: int | slice) -> None:
        for key in self._keys_at(index):
            del self._modules[key]
        self._changed()

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[torch.nn.Module]:
        return iter([self._at(key) for key in self._modules])

    def __add__(self, modules: Iterable[torch.nn.Module]) -> Sequential:
        return Sequential().extend(self).extend(modules)

    def __iadd__(self, modules: Iterable[torch.nn.Module]) -> Self:
        return self.extend(modules)

    def _keys_at(self, index: int | slice) -> list[str]:
        keys = list(self._modules)
        if isinstance(index, slice):
            return keys[index]
        if not -len(keys) <= index < len(keys):
            raise IndexError(f"ops.Sequential: index {index} of {len(keys)} operations")
        return [keys[index]]

    def _at(self, key: str) -> torch.nn.Module:
        module = self._modules[key]
        assert module is not None  # add_module takes none
        return module

    def _changed(self) -> None:
        """Look at the modules before the next call; forget the state of another chain."""
        self._is_checked = False
        if self._buffers:
            self.forget_delayed_state()
        else:
            self.unbind()

    def reset(self) -> None:
        """Give every operation its first values, and forget the delayed state."""
        self.reset_delayed_state()
        for module in self:
            again: Callable[[], object] | None = getattr(module, "reset", None)
            again = again or getattr(module, "reset_parameters", None)
            if again is not None:
                again()

    @property
    def is_link(self) -> bool:
        """Whether its modules are operations of one chain, which another Sequential continues."""
        groups = self._groups()
        return len(groups) == 1 and isinstance(groups[0], _Chain)

    @property
    def is_whole_chain(self) -> bool:
        """Whether no module runs between its operations."""
        return self.is_link

    @property
    def num_extra_inputs(self) -> int:
        """How many extra inputs its call takes."""
        return sum(_open_inputs(module) for module in self._flat())

    @property
    def num_extra_outputs(self) -> int:
        """How many extra outputs its call returns."""
        return sum(_open_outputs(module) for module in self._flat())

    @override
    def runs_alone(self) -> set[str]:
        return {name for name in self._modules if not _is_link(self._at(name))}

    def _flat(self) -> list[torch.nn.Module]:
        """Return the modules in order; a nested Sequential of one chain stands for its own."""
        flat: list[torch.nn.Module] = []
        for module in self:
            if isinstance(module, Sequential) and (module.is_link or not len(module)):
                flat += module._flat()
            else:
                flat.append(module)
        return flat

    def _groups(
        self,
        modules: Sequence[torch.nn.Module] | None = None,
        apart: Collection[int] = (),
    ) -> list[_Chain | torch.nn.Module]:
        """Return the chains, and the modules that run between them, in order; of ``modules``, which
        fusions have changed, if given. Those whose identities are ``apart`` run by themselves."""
        groups: list[_Chain | torch.nn.Module] = []
        chain: list[LowPrecisionModule] = []
        dtype: torch.dtype | None = None
        first_gemm = num_gemms = 0

        def close() -> None:
            nonlocal dtype, first_gemm
            if chain:
                groups.append(_Chain(tuple(chain), first_gemm))
                chain.clear()
            dtype, first_gemm = None, num_gemms

        for module in self._flat() if modules is None else modules:
            is_apart = id(module) in apart
            if is_apart or not isinstance(module, LowPrecisionModule) or not module.is_link:
                # The slots of what it computes stay unused.
                num_gemms += sum([_num_slot_sets(operation) for operation in parts_of(module)])
                close()
                groups.append(module)
                continue
            if isinstance(module, MakeExtraOutput) or _is_fed(module, chain):
                close()
            param = next(module.parameters(), None)
            if param is not None:
                # Links take vectors in float32 beside weights of another dtype.
                is_vector = param.dim() == 1 and param.dtype == torch.float32
                if dtype is not None and param.dtype != dtype and not is_vector:
                    close()
                dtype = param.dtype if dtype is None else dtype
            chain.append(module)
            num_gemms += module.count_slot_sets()
        close()
        return groups

    def _check(self) -> None:
        """Refuse modules that return more than one tensor, and sizes that do not fit."""
        for module in self._flat():
            _check_single_output(module)
        index = 0
        for group in self._groups():
            if isinstance(group, _Chain):
                check_chained("ops.Sequential: operation", group.operations, index)
            index += len(group.operations) if isinstance(group, _Chain) else 1
        self._is_checked = True

    @override
    def link_shapes(self) -> tuple[LinkShape, ...]:
        chains = [group for group in self._groups() if isinstance(group, _Chain)]
        return tuple(shape for chain in chains for shape in chain.shapes)

    @override
    def shape_values(self) -> tuple[LinkShape, ...]:
        return self.link_shapes()  # what an operation within has by now

    def link_params(self) -> list[torch.Tensor]:
        """Return the parameters of all chains; extra inputs come with the call."""
        chains = [group for group in self._groups() if isinstance(group, _Chain)]
        return [
            p for chain in chains for operation in chain.operations for p in operation.link_params()
        ]

    def forward(
        self,
        input: torch.Tensor,
        *extra_inputs: Any,
        is_first_microbatch: bool | None = None,
        op_kwargs: Mapping[Key, Mapping[str, Any]] | None = None,
    ) -> Any:
        """Run the modules on ``input``, with an extra input for each operation that takes one.

        ``is_first_microbatch`` is that of each layer that takes it, as of :class:`fp8core.Linear`.
        ``op_kwargs`` maps a module, or its index, to keyword arguments for its forward. A layer of
        a chain that has some runs by itself in this call, under delayed scaling with a state of its
        own.

        Raises:
            OperandError: the number of extra inputs is wrong, or a module does not take the keyword
                arguments that are for it.
        """
        if not self._is_checked:
            self._check()
        modules = self._flat()
        if has_fusions():
            modules = fused(modules, active(self.outside_autocast).quantize)
        kwargs = self._kwargs_of(op_kwargs, modules)
        groups = self._groups(modules, kwargs)
        num_inputs = self.num_extra_inputs
        if len(extra_inputs) != num_inputs:
            adds = "AddExtraInput" if num_inputs == 1 else "operations that take one"
            raise OperandError(
                f"{self.label}: got {len(extra_inputs)} extra inputs for {num_inputs} {adds}."
            )
        if self.wgrad_queue is None and _delays(groups):
            self.wgrad_queue = WgradQueue()
        tensors = _Tensors(extra_inputs)
        delayed = None if self.wgrad_queue is None else DelayedCall(self.wgrad_queue)
        value = input
        for group in groups:
            if isinstance(group, _Chain):
                extra = [tensors.take(operation) for operation in group.operations]
                is_whole = len(groups) == 1
                result = self._run_chain(
                    group, value, extra, is_first_microbatch, delayed, is_whole=is_whole
                )
                value = tensors.keep(group.operations[0], result)
            else:
                named = kwargs.pop(id(group), {})
                is_layer = isinstance(group, LowPrecisionModule)
                if is_first_microbatch is not None and is_layer and takes_keyword(group, _FIRST):
                    named = {_FIRST: is_first_microbatch, **named}
                result = group(value, *tensors.take(group), **named)
                value = tensors.keep(group, result)
        return (value, *tensors.outputs) if tensors.outputs else value

    def _run_chain(
        self,
        chain: _Chain,
        input: torch.Tensor,
        extra: Sequence[Sequence[torch.Tensor]],
        first: bool | None,
        delayed: DelayedCall | None,
        *,
        is_whole: bool,
    ) -> Any:
        """Return the output of ``chain``, followed by its input if that is an extra output."""
        params: list[torch.Tensor] = []
        for operation, inputs in zip(chain.operations, extra, strict=True):
            self._check_extra(inputs, input)
            params += inputs or operation.link_params()
        like, shapes = chain.like, chain.shapes
        if all(shape.leaves_chain for shape in shapes):  # ops.Identity, ops.MakeExtraOutput
            return (input, input) if chain.returns_input else input
        source, input = input, cast_to_weight(input, like)
        columns = input_columns_of(shapes)
        # A layer is bound for its own mode: one of an operation, as of a dropout, may be another.
        is_uniform_mode = all(operation.training is self.training for operation in chain.operations)
        if is_whole and is_uniform_mode and not chain.returns_input:
            like_last: Any = {"params": params, "like": like, "arguments": shapes}
            return run_layer(self, input, first, columns=columns, **like_last)[0]
        dtype = check_input(self, input, like, columns)
        bound = bind(self, input.device, dtype, shapes=shapes, first_gemm=chain.first_gemm)
        call = bound.call(first)
        chain_params: Sequence[torch.Tensor] = params
        if delayed is not None:
            call, chain_params = delaying(shapes, delayed, call, params)
        value = input if input.dtype == dtype else input.to(dtype)
        arguments = self, bound, bound.parts[0], value, chain_params, call
        if not chain.returns_input:
            return run_links(*arguments)
        if torch.promote_types(source.dtype, dtype) != dtype:  # the extra output has all bits
            return run_links(*arguments), source
        # In the dtype of the chain gradients are added before they are rounded to the input's.
        output, extra_output = run_links(*arguments, run=run_returning_input)
        return output, extra_output.to(source.dtype)

    def _check_extra(self, tensors: Sequence[torch.Tensor], input: torch.Tensor) -> None:
        for index, tensor in enumerate(tensors):
            name = f"extra input {index}"
            check_kind(self.label, name, tensor)
            if tensor.device != input.device:
                role = f"{self.label}: {name}"
                raise elsewhere(role, tensor.device, "the input", input.device)

    def _kwargs_of(
        self,
        kwargs_by_key: Mapping[Key, Mapping[str, Any]] | None,
        modules: Sequence[torch.nn.Module],
    ) -> dict[int, Mapping[str, Any]]:
        """Return the keyword arguments by the identity of the one of ``modules`` they are for."""
        named: dict[int, Mapping[str, Any]] = {}
        for key, kwargs in (kwargs_by_key or {}).items():
            module = self[key] if isinstance(key, int) else key
            is_module = isinstance(module, torch.nn.Module)
            kind = type(module).__name__ if is_module else repr(module)
            if not isinstance(kwargs, Mapping):
                raise OperandError(
                    f"{self.label}: op_kwargs has {kwargs!r} for {kind}; expected a mapping of "
                    f"keyword arguments."
                )
            fault = _placing_fault(module, modules, named)
            if fault is not None:
                shown = key if isinstance(key, int) else kind
                raise OperandError(
                    f"{self.label}: op_kwargs for {shown}, which {fault}. Name a module "
                    f"inside of an inner Sequential by itself."
                )
            refused = [name for name in kwargs if not takes_keyword(module, name)]
            if refused or (_is_link(module) and module.need_backward_dw()):  # type: ignore[operator]  # a layer's
                raise OperandError(
                    f"{self.label}: op_kwargs for {kind}, "
                    + (f"which has no argument {refused[0]!r}." if refused else _NO_QUEUE)
                )
            named[id(module)] = kwargs
        return named

    def need_backward_dw(self) -> bool:
        """Return whether one of the modules has ``delay_wgrad_compute``."""
        modules = [module for module in self if isinstance(module, LowPrecisionModule)]
        return any(module.need_backward_dw() for module in modules)

    def backward_dw(self) -> None:
        """Compute the weight gradients that a backward pass left, in the order of backward."""
        for group in reversed(self._groups()):
            if isinstance(group, LowPrecisionModule):
                group.backward_dw()
        super().backward_dw()

    def _describe(self) -> list[str]:
        return []


class _Tensors:
    """The extra inputs that are left, the channels, and the extra outputs for the caller."""

    def __init__(self, extra_inputs: Sequence[Any]) -> None:
        self._left = iter(extra_inputs)
        self._channels: dict[str, torch.Tensor] = {}
        self.outputs: list[torch.Tensor] = []

    def take(self, module: torch.nn.Module) -> list[Any]:
        """Return the extra inputs of ``module``.

        Raises:
            OperandError: no earlier operation fills a channel of ``module``.
        """
        if isinstance(module, Sequential):
            return [next(self._left) for _ in range(module.num_extra_inputs)]
        if not isinstance(module, ExtraTensors):
            return []
        return [
            next(self._left) if channel is None else None if wired else self._from(channel, module)
            for channel, wired in zip(module.input_channels, module.wires(), strict=True)
        ]

    def _from(self, channel: str, module: torch.nn.Module) -> torch.Tensor:
        if channel not in self._channels:
            raise OperandError(
                f"{type(module).__name__}: no operation before it fills channel {channel!r}; "
                f"filled: {', '.join(self._channels) or 'none'}."
            )
        return self._channels[channel]

    def keep(self, module: torch.nn.Module, result: Any) -> Any:
        """Return the output in ``result``, and keep the extra outputs behind it."""
        if isinstance(module, Sequential):
            count = module.num_extra_outputs
            if count:
                self.outputs += result[1:]
            return result[0] if count else result
        if not isinstance(module, ExtraTensors) or not module.num_extra_outputs:
            return result
        for tensor, (channel, is_public) in zip(result[1:], module.output_channels, strict=True):
            if channel is not None:
                self._channels[channel] = tensor
            if is_public:
                self.outputs.append(tensor)
        return result[0]


_FIRST = "is_first_microbatch"
_NO_QUEUE = "whose weight gradients are left to the Sequential. Leave out delay_wgrad_compute."


def _num_slot_sets(module: torch.nn.Module) -> int:
    is_link = isinstance(module, LowPrecisionModule) and module.is_link
    return module.count_slot_sets() if is_link else 0  # type: ignore[operator]  # as is_link says


def _placing_fault(
    module: torch.nn.Module, modules: Sequence[torch.nn.Module], named: Container[int]
) -> str | None:
    """Say why ``module`` is no place for keyword arguments; None if it is once in ``modules`` and
    its identity not in ``named``."""
    if id(module) in named:
        return "an earlier key names"
    times = sum(module is contained for contained in modules)
    if times == 1:
        return None
    return f"is in it {times} times" if times else "is not in it, or a fusion replaces it"


def _is_link(module: torch.nn.Module) -> bool:
    return isinstance(module, LowPrecisionModule) and module.is_link


def _is_fed(module: torch.nn.Module, chain: Sequence[torch.nn.Module]) -> bool:
    """Return whether ``module`` takes an extra output of ``chain``."""
    if not isinstance(module, ExtraTensors) or not chain:
        return False
    first = chain[0]  # no other operation of a chain has any
    filled = first.output_channels if isinstance(first, ExtraTensors) else []
    return any(channel in module.input_channels for channel, _ in filled if channel is not None)


def _open_inputs(module: torch.nn.Module) -> int:
    if isinstance(module, Sequential):
        return module.num_extra_inputs
    return module.input_channels.count(None) if isinstance(module, ExtraTensors) else 0


def _open_outputs(module: torch.nn.Module) -> int:
    if isinstance(module, Sequential):
        return module.num_extra_outputs
    if not isinstance(module, ExtraTensors):
        return 0
    return sum(is_public for _, is_public in module.output_channels)


def _check_single_output(module: torch.nn.Module) -> None:
    if not isinstance(module, LowPrecisionModule):
        return
    leaves = getattr(module, "return_layernorm_output", False)
    if leaves or getattr(module, "return_bias", False):
        raise UnsupportedError(f"ops.Sequential: {module.label} returns more than one tensor.")


def _delays(groups: Sequence[_Chain | torch.nn.Module]) -> bool:
    """Return whether an operation of a chain leaves its weight gradients for later."""
    chains = [group for group in groups if isinstance(group, _Chain)]
    return any(operation.need_backward_dw() for chain in chains for operation in chain.operations)
