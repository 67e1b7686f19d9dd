"""Records what a run of bound operations enqueues, so that one native call enqueues it again.

A run consists of allocations, launches of the native library, and a few of torch's operators. Each
is noted as it happens, an address by the tensor in which it lies. Whatever else happens is noticed,
and then there is no recording: an operator of torch that is not among those few, a native entry
that is not recorded, an address that lies in no tensor.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from fp8core.backend_api import Recording
from fp8core_backends.cuda import memory
from fp8core_backends.cuda.layout import ALIGNMENT_OF_ALLOCATIONS, round_up
from fp8core_backends.cuda.private import TorchDispatchMode, apart_from_modes, view_of_copy
from fp8core_backends.cuda.stream import raw_stream

_aten = torch.ops.aten
_VIEWS = frozenset(
    (
        *(_aten.slice.Tensor, _aten.split.Tensor, _aten.split_with_sizes.default),
        *(_aten.squeeze.dim, _aten.t.default, _aten.transpose.int),
        *(_aten.view.default, view_of_copy),
    )
)
"""Operators that compute nothing. A view is noticed where it is a result or its address is
passed."""

_WIDE_VIEW = _aten.as_strided.default
"""A view that may end behind its tensor, in memory that another call's tensor need not have."""

_ALLOCATION = _aten.new_empty.default

_REPEATED = {
    _aten._to_copy.default: _aten._to_copy.default,
    _aten.clone.default: torch.clone,
    _aten.constant_pad_nd.default: _aten.constant_pad_nd.default,
    _aten.mm.default: torch.mm,
    _aten.addmm.default: torch.addmm,
}
"""Operators that a repeat calls again, functions of their arguments alone, whose result is a new
tensor; and what it calls: torch's own binding reads arguments in less time, where there is one."""

_WRITING: Mapping[Any, Callable[..., torch.Tensor]] = {
    _aten.mm.out: torch.mm,
    _aten.addmm.out: torch.addmm,
}
"""Such operators that write into the tensor ``out``."""

Size: TypeAlias = "tuple[int, ...]"

_SCRATCH = -2
"""Stands for the number of the memory that temporary tensors share."""

_MOST_SCRATCH = 4 << 20
"""Bytes: it is held until the last of them is read, which may be later than each of them is."""


class _Place(NamedTuple):
    """The memory of a tensor of a run, which may be freed by now and belong to a later tensor."""

    address: int
    num_bytes: int
    size: Size
    stride: Size
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: torch.Tensor) -> _Place:
        size, stride = tuple(tensor.shape), tuple(tensor.stride())
        last = sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        num_bytes = (last + 1) * tensor.itemsize if tensor.numel() else 0
        return cls(tensor.data_ptr(), num_bytes, size, stride, tensor.dtype)

    def offset_of(self, address: int) -> int | None:
        """Return how many bytes from its start ``address`` lies, None if it lies elsewhere."""
        offset = address - self.address
        return offset if 0 <= offset < self.num_bytes else None


class _Empty(NamedTuple):
    """The allocation of the tensor ``creates``."""

    creates: int
    size: Size
    stride: Size
    dtype: torch.dtype

    @property
    def reads(self) -> Sequence[int]:
        """None: an allocation reads no tensor."""
        return ()

    def add(self, native: Any, where: Where) -> None:
        native.add_empty(where(self.creates)[0], self.size, self.stride, self.dtype)


class _Launched(NamedTuple):
    """A native call with a place for each of its addresses: the number of a tensor, -1 for a null
    pointer, and bytes from the tensor's start."""

    launch: Any
    places: Sequence[tuple[int, int]]
    creates: int = -1

    @property
    def reads(self) -> Sequence[int]:
        """The tensors whose addresses it is given."""
        return [number for number, _ in self.places if number >= 0]

    def add(self, native: Any, where: Where) -> None:
        places = []
        for number, offset in self.places:
            holder, start = (number, 0) if number < 0 else where(number)
            places.append((holder, start + offset))
        self.launch.set_places(places)
        native.add_launch(self.launch)


class _Called(NamedTuple):
    """A call of torch's ``function``, whose result is the tensor ``creates``. ``numbers`` are those
    of arguments that are tensors, -1 stands for one of ``values``."""

    creates: int
    function: Any
    numbers: Sequence[int]
    values: Sequence[Any]
    keywords: Mapping[str, Any]

    @property
    def reads(self) -> Sequence[int]:
        """The tensors among its arguments."""
        return [number for number in self.numbers if number >= 0]

    def add(self, native: Any, where: Where) -> None:
        numbers = [number if number < 0 else where(number)[0] for number in self.numbers]
        created, _ = where(self.creates)
        native.add_call(created, self.function, list(self.values), numbers, dict(self.keywords))


class _View(NamedTuple):
    """How a tensor lies in the one that holds it; ``offset`` is in elements."""

    size: Size
    stride: Size
    dtype: torch.dtype
    offset: int

    @classmethod
    def of(cls, tensor: torch.Tensor, holder: _Place | None, offset: int) -> _View | None:
        """Return the view by which ``tensor``, ``offset`` bytes behind the start of ``holder``, is
        made of ``holder``; None if ``tensor`` is ``holder``.

        Raises:
            _Refused: the holder has another dtype, or its memory is not one block.
        """
        view = _Place.of(tensor)
        if view == holder:
            return None
        if holder is None or holder.dtype != view.dtype:
            raise _Refused("a view of another dtype, given to a function")
        return cls(view.size, view.stride, view.dtype, offset // tensor.itemsize)

    def __call__(self, holder: torch.Tensor) -> torch.Tensor:
        return holder.as_strided(self.size, self.stride, holder.storage_offset() + self.offset)


class _OnViews(NamedTuple):
    """A function that is given views of tensors, as one that is given the tensors."""

    function: Callable[..., torch.Tensor]
    views: Sequence[_View | None]

    def __call__(self, *holders: Any, **keywords: Any) -> torch.Tensor:
        pairs = zip(self.views, holders, strict=True)
        arguments = (holder if view is None else view(holder) for view, holder in pairs)
        return self.function(*arguments, **keywords)


class _Writing(NamedTuple):
    """A function whose last argument is the tensor that it writes its result into."""

    function: Callable[..., torch.Tensor]

    def __call__(self, *arguments: Any) -> torch.Tensor:
        *factors, out = arguments
        return self.function(*factors, out=out)


class _Arguments(NamedTuple):
    """The numbers of arguments that are tensors, or lie in them as ``views`` say; -1 stands for one
    of ``values``."""

    numbers: Sequence[int]
    values: Sequence[Any]
    views: Sequence[_View | None]

    def called(self, creates: int, function: Any, keywords: Mapping[str, Any]) -> _Called:
        """Return the step that calls ``function`` with them."""
        if any(view is not None for view in self.views):
            function = _OnViews(function, self.views)
        return _Called(creates, function, self.numbers, self.values, keywords)


class _Together(NamedTuple):
    """Copies several numbers by one operator, each to an address that is aligned as that of a copy
    by itself; ``gap`` lies behind each."""

    gap: torch.Tensor

    def __call__(self, *numbers: torch.Tensor) -> torch.Tensor:
        return torch.cat([piece for number in numbers for piece in (number, self.gap)])


_Step: TypeAlias = "_Empty | _Launched | _Called"
Where: TypeAlias = "Callable[[int], tuple[int, int]]"
"""Returns the number of a tensor in the native program, and where it begins there, in bytes."""


class _Refused(Exception):
    """The run did something that cannot be repeated."""


class _Log(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's class has no types
    """The tensors and the steps of a run.

    Numbers of tensors are positions in ``places``. Tensors of the caller come first; None is in the
    place of a tensor that is absent.
    """

    def __init__(
        self, source: memory.Source, library: Any, operands: Sequence[torch.Tensor | None]
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self._source = source
        self._library = library
        self._is_in_function = False  # of which nothing is noted but its result
        self.num_unheard = 0  # native calls in functions that are not recorded
        self.places = [None if tensor is None else _Place.of(tensor) for tensor in operands]
        self.steps: list[_Step] = []
        self.problem: str | None = None
        tensors = sorted(
            (place for place in self.places if place is not None), key=lambda place: place.address
        )
        if not all(place.num_bytes for place in tensors):
            self.problem = "a tensor without elements, whose address is any"
        for place, following in itertools.pairwise(tensors):
            if place.offset_of(following.address) is not None:
                self.problem = "two tensors in the same memory: which one is meant by an address?"

    def empty(self, size: Size, stride: Size, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor, and note it."""
        tensor = self._source.now()(size, stride, dtype)
        if self._is_in_function:
            return tensor
        number = self._number(tensor)
        self.steps.append(_Empty(number, size, stride, dtype))
        return tensor

    def launched(self, launch: Any) -> None:
        """Note a native call."""
        if self._is_in_function:
            return
        try:
            places = [
                self.place_of(address) if address else (-1, 0) for address in launch.addresses()
            ]
        except _Refused as refused:
            self.problem = str(refused)
            return
        self.steps.append(_Launched(launch, places))

    def called(
        self, function: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Call ``function(*tensors)``, and note the call alone."""
        arguments = None
        try:
            arguments = self._places_of(tensors)
        except _Refused as refused:
            self.problem = str(refused)
        before = self._library.num_unheard()
        self._is_in_function = True
        try:
            with apart_from_modes():
                result = function(*tensors)
        finally:
            self._is_in_function = False
            self.num_unheard += self._library.num_unheard() - before
        if arguments is not None:
            self.steps.append(arguments.called(self._number(result), function, {}))
        return result

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator of torch, and note it."""
        keywords = {} if kwargs is None else kwargs
        if func in _VIEWS:
            return func(*args, **keywords)
        if func is _WIDE_VIEW:
            return self._wide_view(func(*args, **keywords))
        try:
            arguments = self._arguments_of(func, args, keywords)
        except _Refused as refused:
            self.problem = str(refused)
            return func(*args, **keywords)
        result = func(*args, **keywords)
        if func in _WRITING:
            self.places.append(None)  # it is found where it was made
            writing = _Writing(_WRITING[func])
            self.steps.append(arguments.called(len(self.places) - 1, writing, {}))
            return result
        number = self._number(result)
        if func is _ALLOCATION:
            self.steps.append(_Empty(number, *self.places[number][2:]))  # type: ignore[index]  # it was numbered now
        else:
            self.steps.append(arguments.called(number, _REPEATED[func], keywords))
        return result

    def _wide_view(self, view: torch.Tensor) -> torch.Tensor:
        """Return ``view``, and note if it ends behind the tensor in which it begins."""
        try:
            number, offset = self.place_of(view.data_ptr())
        except _Refused as refused:
            self.problem = str(refused)
            return view
        holder = self.places[number]
        if holder is not None and offset + _Place.of(view).num_bytes > holder.num_bytes:
            self.problem = "a view of memory behind a tensor that was given"
        return view

    def _arguments_of(self, func: Any, args: Sequence[Any], keywords: dict[str, Any]) -> _Arguments:
        if func in _WRITING and [*keywords] == ["out"]:
            return self._places_of((*args, keywords["out"]))
        options = [value for name, value in keywords.items() if name != "dtype"]
        if func is _ALLOCATION:
            is_repeated = not any(options)
        else:
            is_tensor = [isinstance(value, torch.Tensor) for value in options]
            is_repeated = func in _REPEATED and not any(is_tensor)
        if not is_repeated:
            raise _Refused(f"the operator {func}")
        return self._places_of(args)

    def _places_of(self, args: Sequence[Any]) -> _Arguments:
        """Return which tensor each argument is, or lies in; the others as they are."""
        numbers: list[int] = []
        views: list[_View | None] = []
        for argument in args:
            if not isinstance(argument, torch.Tensor):
                numbers.append(-1)
                views.append(None)
                continue
            number, offset = self.place_of(argument.data_ptr())
            numbers.append(number)
            views.append(_View.of(argument, self.places[number], offset))
        plain = [
            argument if number < 0 else None for number, argument in zip(numbers, args, strict=True)
        ]
        return _Arguments(numbers, plain, tuple(views))

    def _number(self, tensor: torch.Tensor) -> int:
        self.places.append(_Place.of(tensor))
        return len(self.places) - 1

    def view(self, number: int, offset: int, tensor: torch.Tensor) -> int:
        """Return the number of ``tensor``, ``offset`` bytes within one that was given: that one's,
        or that of a view which each repeat makes of it."""
        view = _View.of(tensor, self.places[number], offset)
        if view is None:
            return number
        self.steps.append(_Called(self._number(tensor), view, [number], [None], {}))
        return len(self.places) - 1

    def place_of(self, address: int) -> tuple[int, int]:
        """Return the number of the latest tensor that ``address`` lies in, and the offset there."""
        for number in range(len(self.places) - 1, -1, -1):
            candidate = self.places[number]
            offset = None if candidate is None else candidate.offset_of(address)
            if offset is not None:
                return number, offset
        raise _Refused("an address that lies in no tensor of the call")


class Recorder:
    """Records runs on one CUDA device; see :class:`fp8core.backend_api.Recorder`.

    ``problem`` says why the latest run is not repeated.
    """

    __slots__ = ("_library", "_logs", "_memory", "_source", "problem")

    def __init__(self, index: int, library: Any) -> None:
        self._library = library
        self._source = source = memory.source(index)
        functions = (torch.Tensor.data_ptr, torch.as_strided, raw_stream)
        self._memory = library.Memory(
            index, source.current, source.here, source.elsewhere, *functions
        )
        self._logs: dict[int, _Log] = {}  # by thread, while it records a run
        self.problem: str | None = None

    def call(self, function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
        """Call ``function(*tensors)`` in the run that this thread records; see the backend API."""
        log = self._logs.get(threading.get_ident())
        return function(*tensors) if log is None else log.called(function, tensors)

    def record(
        self,
        run: Callable[[], Sequence[torch.Tensor | None]],
        leading: Sequence[torch.Tensor],
        saved: Sequence[torch.Tensor | None] = (),
        constants: Sequence[torch.Tensor] = (),
    ) -> Recording:
        """Call ``run``; see the backend API."""
        if torch.cuda.is_current_stream_capturing():  # an algorithm chosen now is not kept
            self.problem = "a CUDA graph is being captured"
            return Recording(run(), None)
        distinct = [*{id(tensor): tensor for tensor in constants}.values()]
        log = _Log(self._source, self._library, [*leading, *saved, *distinct])
        program = _Program(self._library.Program(self._memory, ALIGNMENT_OF_ALLOCATIONS), log)
        program.give(leading, len(saved), distinct)
        before, thread = self._library.num_unheard(), threading.get_ident()
        self._logs[thread] = log
        try:
            with log, memory.noting(self._source.device_index, log.empty):
                results = self._library.listening(log.launched, run)
        finally:
            del self._logs[thread]
        if self._library.num_unheard() != before + log.num_unheard:
            log.problem = "a native call that is not recorded"
        self.problem = log.problem or program.finish(results)
        return Recording(results, None if self.problem else program.native)


class _Program:
    """A native program as it is put together from a log."""

    def __init__(self, native: Any, log: _Log) -> None:
        self.native = native
        self._log = log
        self._leading: Sequence[torch.Tensor] = ()
        self._constants: Sequence[torch.Tensor] = ()
        self._saved = self._created = 0  # the first numbers of each kind

    def give(
        self,
        leading: Sequence[torch.Tensor],
        num_saved: int,
        constants: Sequence[torch.Tensor],
    ) -> None:
        """Number the tensors that the caller gives."""
        native, tensors = self.native, self._log.places
        self._leading, self._constants = leading, constants
        self._saved, first_constant = len(leading), len(leading) + num_saved
        self._created = first_constant + len(constants)
        for tensor in leading:
            native.add_leading(tensor.data_ptr())
        for number in range(self._saved, first_constant):
            saved = tensors[number]
            native.add_saved(0 if saved is None else saved.address)
        for tensor in constants:
            native.add_constant(tensor, tensor.data_ptr())
        self._freed = [n for n in range(self._saved, first_constant) if tensors[n] is not None]

    def finish(self, results: Sequence[torch.Tensor | None]) -> str | None:
        """Add steps and results; return why that cannot be done, None if it was.

        A tensor is released after the last step that reads it, a saved tensor also if no step
        does. The release is never later than in the run, but for tensors that share a scratch.
        """
        try:
            added = self._copied_together([self._result(result) for result in results])
        except _Refused as refused:
            return str(refused)
        steps, returned = self._log.steps, {number for number, *_ in added}
        last = dict.fromkeys(self._freed, -1)
        for at, step in enumerate(steps):
            last.update({n: at for n in (*step.reads, step.creates) if self._is_released(n)})
        last = {number: at for number, at in last.items() if number not in returned}
        scratch = _Scratch.of(self._log, last)
        if scratch is not None:
            last = {number: at for number, at in last.items() if number not in scratch.starts}
            last[_SCRATCH] = scratch.last
        released: dict[int, list[int]] = {}
        for number, at in last.items():
            released.setdefault(at, []).append(number)
        numbers: dict[int, int] = {}  # of created tensors, in the native program

        def where(number: int) -> tuple[int, int]:
            start = 0
            if scratch is not None and number in scratch.starts:
                number, start = _SCRATCH, scratch.starts[number]
            if 0 <= number < self._created:
                return number, start
            return numbers.setdefault(number, self._created + len(numbers)), start

        for at in range(-1, len(steps)):
            if at >= 0:
                step = steps[at]
                if scratch is None or step.creates not in scratch.starts:
                    step.add(self.native, where)
                elif _SCRATCH not in numbers:
                    _Empty(_SCRATCH, (scratch.num_bytes,), (1,), torch.uint8).add(
                        self.native, where
                    )
            for number in released.get(at, ()):
                self.native.add_release(where(number)[0])
        for number, *view in added:
            if view:
                self.native.add_view(where(number)[0], *view)
            else:
                self.native.add_result(number if number < 0 else where(number)[0])
        return None

    def _copied_together(self, added: Sequence[tuple[Any, ...]]) -> Sequence[tuple[Any, ...]]:
        """Have constants of one number whose copies are results copied by one operator, where the
        last of them was; return ``added`` with views of its result.

        A copy may wait if no later step is given what it copies, which nothing writes until then.
        """
        steps, places = self._log.steps, self._log.places
        first = self._created - len(self._constants)
        last = {number: at for at, step in enumerate(steps) for number in step.reads}
        copies = {}
        for at, step in enumerate(steps):
            if isinstance(step, _Called) and step.function is torch.clone:
                (source,), place = step.numbers, places[step.creates]
                is_number = place is not None and (place.size, place.dtype) == ((1,), torch.float32)
                is_unread = step.creates not in last and (step.creates,) in added
                if first <= source < self._created and last[source] == at and is_number & is_unread:
                    copies[step.creates] = source
        if len(copies) < 2:
            return added
        pitch = ALIGNMENT_OF_ALLOCATIONS // torch.float32.itemsize
        copy = _Together(self._constants[0].new_zeros(pitch - 1, dtype=torch.float32))
        sources = [*copies.values()]
        together = _Called(len(places), copy, sources, [None] * len(sources), {})
        places.append(None)  # no address is looked for any more
        *_, latest = copies
        self._log.steps = [
            together if step.creates == latest else step
            for step in steps
            if step.creates == latest or step.creates not in copies
        ]
        views = {
            (number,): (together.creates, (1,), places[number].stride, at * pitch)  # type: ignore[union-attr]  # seen above
            for at, number in enumerate(copies)
        }
        return [views.get(entry, entry) for entry in added]

    def _is_released(self, number: int) -> bool:
        return number >= self._created or number in self._freed

    def _result(self, result: torch.Tensor | None) -> tuple[Any, ...]:
        """Return the number of ``result``, -1 for None; of a view the number of the tensor that it
        views, its size and stride, and how many elements from the start it begins."""
        if result is None:
            return (-1,)
        if type(result) is not torch.Tensor and all(
            result is not tensor for tensor in self._leading
        ):
            raise _Refused(f"a result that is a {type(result).__name__}")
        address = result.data_ptr()
        for leading, place in enumerate(self._log.places[: self._saved]):
            offset = None if place is None else place.offset_of(address)
            if offset is not None:
                return (self._log.view(leading, offset, result),)
        number, offset = self._log.place_of(address)
        holder, memory_of_result = self._log.places[number], _Place.of(result)
        if number < self._created:
            raise _Refused("a result that shares the memory of a tensor that was saved")
        if holder == memory_of_result:
            return (number,)
        if (
            holder is None
            or holder.dtype != memory_of_result.dtype
            or not memory_of_result.num_bytes
        ):
            raise _Refused("a result that is a view of another dtype, or empty")
        # The holder begins where its storage does.
        return number, memory_of_result.size, memory_of_result.stride, offset // result.itemsize


class _Scratch(NamedTuple):
    """Memory that temporary tensors share, those that a run allocates and does not return.

    An allocation costs as much time as a launch, and small tensors are many. ``starts`` are bytes
    by the numbers of tensors, ``last`` is the last step that reads one of them.
    """

    starts: Mapping[int, int]
    num_bytes: int
    last: int

    @classmethod
    def of(cls, log: _Log, last: Mapping[int, int]) -> _Scratch | None:
        """Return the memory for temporary tensors, the smallest first, as long as they do not take
        more than _MOST_SCRATCH together; ``last`` is the last step that reads each. None for fewer
        than two: torch's operators take tensors, which are never among them."""
        read = {n for step in log.steps if isinstance(step, _Called) for n in step.reads}
        sizes = {}
        for step in log.steps:
            if isinstance(step, _Empty) and step.creates in last and step.creates not in read:
                tensor = log.places[step.creates]
                assert tensor is not None
                sizes[step.creates] = round_up(tensor.num_bytes, ALIGNMENT_OF_ALLOCATIONS)
        total, chosen = 0, set()
        for number in sorted(sizes, key=lambda number: sizes[number]):
            total += sizes[number]
            if total > _MOST_SCRATCH:
                break
            chosen.add(number)
        if len(chosen) < 2:
            return None
        starts: dict[int, int] = {}
        for at, step in enumerate(log.steps):
            if step.creates in chosen:
                overlapping = [n for n in starts if last[n] >= at]
                starts[step.creates] = _first_gap(
                    sorted((starts[n], starts[n] + sizes[n]) for n in overlapping),
                    sizes[step.creates],
                )
        num_bytes = max(starts[number] + sizes[number] for number in chosen)
        return cls(starts, num_bytes, max(last[number] for number in chosen))


def _first_gap(occupied: Sequence[tuple[int, int]], size: int) -> int:
    """Return the lowest start of ``size`` bytes beside ``occupied``, intervals in order."""
    start = 0
    for begin, end in occupied:
        if begin - start >= size:
            break
        start = max(start, end)
    return start


@functools.cache
def recorder(index: int, library: Any) -> Recorder:
    """Return the recorder of the CUDA device of ``index``: the same one each time."""
    return Recorder(index, library)
