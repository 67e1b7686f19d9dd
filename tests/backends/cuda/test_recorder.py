"""What a recording of native calls consists of, by a library that stands in for the native one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from fp8core.backend_api import GemmDesc
from fp8core_backends.cuda import memory, native, recorder
from fp8core_backends.cuda.backend import CudaBackend
from fp8core_backends.cuda.layout import scales

SIZE, STRIDE = (4, 8), (8, 1)


class Launch:
    """A native call with these addresses."""

    def __init__(self, addresses: list[int]) -> None:
        self._addresses = addresses
        self.places: list[tuple[int, int]] = []

    def addresses(self) -> list[int]:
        return self._addresses

    def set_places(self, places: list[tuple[int, int]]) -> None:
        self.places = places


class Program:
    """Keeps what is added to it, by kind."""

    def __init__(self, *arguments: object) -> None:
        self.added: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *values: self.added.append((name.removeprefix("add_"), *values))

    @property
    def steps(self) -> list[tuple[Any, ...]]:
        """What is done, by kind and by the numbers of tensors."""
        short = []
        for kind, *values in self.added:
            if kind == "launch":
                short.append((kind, *(number for number, _ in values[0].places)))
            elif kind == "call":
                short.append((kind, values[1], values[3]))
            elif kind in ("empty", "release", "result"):
                short.append((kind, values[0]))
            elif kind == "view":
                short.append((kind, *values))
        return short


class Library:
    """The functions of the native library that a recorder calls."""

    Program = Program

    def __init__(self) -> None:
        self.listen: Callable[[Launch], None] | None = None
        self.unheard = 0

    def Memory(self, *arguments: object) -> None:
        """Where the tensors of a program come from."""

    def num_unheard(self) -> int:
        return self.unheard

    def listening(self, listen: Callable[[Launch], None], run: Callable[[], Any]) -> Any:
        self.listen = listen
        return run()

    def launch(self, *addresses: int | torch.Tensor | None) -> Launch:
        """Stand for an entry that is called with the addresses of tensors."""
        given = [one.data_ptr() if isinstance(one, torch.Tensor) else one or 0 for one in addresses]
        launch = Launch(given)
        assert self.listen is not None
        self.listen(launch)
        return launch


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    here = torch._C._dynamo.guards._empty_strided_cpu
    monkeypatch.setattr(memory, "_empty_here", here)
    monkeypatch.setattr(memory, "_current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return Library()


def record(
    library: Library,
    run: Callable[[], Sequence[torch.Tensor | None]],
    leading: Sequence[torch.Tensor] = (),
    saved: Sequence[torch.Tensor | None] = (),
    constants: Sequence[torch.Tensor] = (),
) -> tuple[Any, str | None]:
    """Return the program, None if there is none, and the problem."""
    one = recorder.Recorder(0, library)
    repeat: Any = one.record(run, leading, saved, constants).repeat
    assert (repeat is None) == (one.problem is not None)
    return repeat, one.problem


def steps(library: Library, run: Any, *given: Any) -> list[tuple[Any, ...]]:
    program, problem = record(library, run, *given)
    assert problem is None
    return program.steps  # type: ignore[no-any-return]


def refusal(library: Library, run: Any, *given: Any) -> str:
    program, problem = record(library, run, *given)
    assert program is None
    assert problem is not None
    return problem


def test_a_tensor_is_released_after_the_last_call_that_reads_it(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_MOST_SCRATCH", 0)
    x, empty = torch.ones(SIZE), memory.allocator(0)

    def run() -> Sequence[torch.Tensor]:
        codes, workspace = (empty(SIZE, STRIDE, torch.uint8) for _ in range(2))
        library.launch(x, codes, workspace)
        y = empty(SIZE, STRIDE, torch.bfloat16)
        library.launch(codes, None, y)
        return (y,)

    assert steps(library, run, (x,)) == [
        *(("empty", 1), ("empty", 2), ("launch", 0, 1, 2), ("release", 2)),
        *(("empty", 3), ("launch", 1, -1, 3), ("release", 1), ("result", 3)),
    ]


def test_temporary_tensors_share_an_allocation(library: Library) -> None:
    x, empty, launches = torch.ones(SIZE), memory.allocator(0), []

    def run() -> Sequence[torch.Tensor]:
        codes, workspace = empty((4, 100), (100, 1), torch.uint8), empty((1,), (1,), torch.float32)
        launches.append(library.launch(x, codes, workspace))
        y = empty(SIZE, STRIDE, torch.bfloat16)
        again = empty((2,), (1,), torch.float32)  # where the workspace was
        launches.append(library.launch(codes, codes.data_ptr() + 100, again, y))
        return (y,)

    assert steps(library, run, (x,)) == [
        *(("empty", 1), ("launch", 0, 1, 1), ("empty", 2), ("launch", 1, 1, 1, 2)),
        *(("release", 1), ("result", 2)),
    ]
    aligned = recorder.ALIGNMENT_OF_ALLOCATIONS
    assert launches[0].places == [(0, 0), (1, 0), (1, 2 * aligned)]
    assert launches[1].places == [(1, 0), (1, 100), (1, 2 * aligned), (2, 0)]


def test_a_scratch_is_no_larger_than_its_bound(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "_MOST_SCRATCH", 600)
    empty = memory.allocator(0)

    def run() -> Sequence[torch.Tensor]:
        sizes = (300, 100, 200, 100)
        library.launch(*[empty((size,), (1,), torch.uint8) for size in sizes])
        return ()

    (shared,) = [n for kind, *n in steps(library, run) if kind == "launch"]
    assert len(set(shared)) == 3
    assert shared[1] == shared[2]


def test_what_torch_reads_is_in_no_scratch(library: Library) -> None:
    empty = memory.allocator(0)

    def run() -> Sequence[torch.Tensor]:
        total, workspace, other = (empty(SIZE, STRIDE, torch.float32) for _ in range(3))
        library.launch(total, workspace, other)
        return (total.to(torch.bfloat16),)

    launched = next(numbers for kind, *numbers in steps(library, run) if kind == "launch")
    assert launched == [0, 1, 1]


def test_saved_tensors_go_as_early_as_nothing_reads_them(library: Library) -> None:
    grad, saved, now = torch.ones(SIZE), [torch.ones(SIZE) for _ in range(3)], memory.allocator_now

    def run() -> Sequence[torch.Tensor | None]:
        library.launch(grad, saved[2])
        out = now(0)()(SIZE, STRIDE, torch.bfloat16)
        library.launch(saved[1], out)
        return (None, out)

    assert steps(library, run, (grad,), saved) == [
        *(("release", 1), ("launch", 0, 3), ("release", 3), ("empty", 4), ("launch", 2, 4)),
        *(("release", 2), ("result", -1), ("result", 4)),
    ]


def test_an_address_within_a_tensor_keeps_its_offset(library: Library) -> None:
    scales = torch.ones(16)
    launches: list[Launch] = []

    def run() -> Sequence[torch.Tensor]:
        launches.append(library.launch(scales[3:], scales.data_ptr() + 40))
        return ()

    steps(library, run, (), (), (scales, scales))
    assert launches[0].places == [(0, 12), (0, 40)]


def test_memory_that_is_used_again_belongs_to_the_latest_tensor(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = torch.zeros(SIZE, dtype=torch.uint8)
    in_turn = iter((first, first.view(torch.int16)))
    monkeypatch.setattr(memory, "_empty_here", lambda *given: next(in_turn))
    empty = memory.allocator(0)

    def run() -> Sequence[torch.Tensor]:
        library.launch(empty(SIZE, STRIDE, torch.uint8))
        y = empty(SIZE, STRIDE, torch.int16)
        library.launch(y)
        return (y,)

    launched = [step for step in steps(library, run) if step[0] == "launch"]
    assert launched == [("launch", 0), ("launch", 1)]


def test_a_conversion_by_torch_is_called_again(library: Library) -> None:
    x, empty = torch.ones(SIZE), memory.allocator(0)

    def run() -> Sequence[torch.Tensor]:
        total = empty(SIZE, STRIDE, torch.float32)
        library.launch(x, total)
        return (total.to(torch.bfloat16), x.to(torch.float32))

    copy = torch.ops.aten._to_copy.default
    assert steps(library, run, (x,)) == [
        *(("empty", 1), ("launch", 0, 1), ("call", copy, [1]), ("release", 1)),
        *(("result", 2), ("result", 0)),
    ]


def test_a_copy_is_made_again_by_the_binding_of_torch(library: Library) -> None:
    x = torch.ones(SIZE).t()
    program, _ = record(library, lambda: (x.clone(), x.contiguous()), (x,))
    plain, contiguous = [values for kind, *values in program.added if kind == "call"]
    assert plain[1] is contiguous[1] is torch.clone
    for (_, function, arguments, numbers, keywords), expected in (
        (plain, x.clone()),
        (contiguous, x.contiguous()),
    ):
        assert (arguments, numbers) == ([None], [0])
        assert function(x, **keywords).stride() == expected.stride()


def test_memory_like_that_of_a_tensor_is_allocated_again(library: Library) -> None:
    x = torch.ones(SIZE)

    def run() -> Sequence[torch.Tensor]:
        joined = x.new_empty((8, 4), dtype=torch.bfloat16)
        library.launch(x, joined[:, 2:])
        return (joined,)

    program, _ = record(library, run, (x,))
    assert ("empty", 1, (8, 4), (4, 1), torch.bfloat16) in program.added
    assert program.steps == [("empty", 1), ("launch", 0, 1), ("result", 1)]


def test_an_operator_on_a_view_is_called_on_that_view_again(library: Library) -> None:
    x = torch.arange(32.0).view(SIZE)
    program, problem = record(library, lambda: [x[1:, 2:].t().clone()], (x,))
    assert problem is None
    (function,) = [one[2] for one in program.added if one[0] == "call"]
    other = torch.rand(SIZE)
    assert torch.equal(function(other), other[1:, 2:].t())


@pytest.mark.parametrize(
    ("mode", "shape", "padding"), [("block128", (3, 6), 2), ("vec128", (37, 3), 3)]
)
def test_scales_are_brought_into_the_layout_of_products_again(
    mode: str, shape: tuple[int, int], padding: int, library: Library
) -> None:
    given = torch.rand(shape)
    program, problem = record(library, lambda: [scales(mode, given).clone()], (given,))
    assert problem is None
    pad, clone = [one[2] for one in program.added if one[0] == "call"]
    other = torch.rand(shape)
    assert torch.equal(clone(pad(other, [0, padding], 0.0)), other)


@pytest.mark.parametrize("is_given", [False, True])
def test_a_view_of_memory_behind_a_tensor_is_taken_of_those_that_are_allocated_so(
    is_given: bool, library: Library
) -> None:
    given, empty = torch.ones(SIZE)[:3], memory.allocator(0)

    def run() -> Sequence[torch.Tensor]:
        part = given if is_given else empty(SIZE, STRIDE, torch.float32)[:3]
        library.launch(part.as_strided(SIZE, STRIDE))
        return ()

    if is_given:  # that of another call may end with its rows
        assert refusal(library, run, (given,)) == "a view of memory behind a tensor that was given"
    else:
        assert steps(library, run) == [("empty", 0), ("launch", 0), ("release", 0)]


def test_a_function_is_one_step_with_the_tensors_that_it_is_given(library: Library) -> None:
    x, empty, one = torch.ones(SIZE), memory.allocator(0), recorder.Recorder(0, library)

    def arrive(result: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
        return result

    def send(codes: torch.Tensor) -> torch.Tensor:
        library.launch(empty(SIZE, STRIDE, torch.float32))  # not a step of the run
        library.unheard += 1
        return codes + 1  # nor is this

    def run() -> Sequence[torch.Tensor]:
        codes = empty(SIZE, STRIDE, torch.uint8)
        library.launch(x, codes)
        started = one.call(send, codes)
        y = empty(SIZE, STRIDE, torch.bfloat16)
        library.launch(x, y)
        arrived = one.call(arrive, started, codes)
        assert arrived is started
        library.launch(arrived, y)
        return (y,)

    program: Any = one.record(run, (x,)).repeat
    assert one.problem is None
    assert program.steps == [
        *(("empty", 1), ("launch", 0, 1), ("call", send, [1]), ("empty", 3), ("launch", 0, 3)),
        *(("call", arrive, [2, 1]), ("release", 1), ("release", 2)),
        *(("launch", 4, 3), ("release", 4), ("result", 3)),
    ]


def test_a_function_outside_of_a_recorded_run_is_called(library: Library) -> None:
    assert recorder.Recorder(0, library).call(torch.neg, torch.ones(1)) == -1


def test_a_result_that_is_a_view_of_a_new_tensor_is_viewed_again(library: Library) -> None:
    empty = memory.allocator(0)

    def run() -> Sequence[torch.Tensor]:
        return (empty(SIZE, STRIDE, torch.float32)[1:3, 2:],)

    assert steps(library, run) == [("empty", 0), ("view", 0, (2, 6), (8, 1), 10)]


def test_a_result_that_is_a_view_of_a_given_tensor_is_made_of_another(library: Library) -> None:
    storage = torch.arange(48.0)
    x, *others = (storage[at:][:32].view(SIZE) for at in (0, 16))
    program: Any = recorder.Recorder(0, library).record(lambda: (x.t(), x[1:], x), (x,)).repeat
    (_, of_t, [number]), (_, of_rows, _), *results = program.steps
    assert number == 0
    assert results == [("result", 1), ("result", 2), ("result", 0)]
    for given in (x, *others):  # one of which does not begin where its storage does
        assert torch.equal(of_t(given), given.t())
        assert torch.equal(of_rows(given), given[1:])


@pytest.mark.parametrize(
    ("run", "reason"),
    [
        (lambda x, library: [x + 1], "aten.add"),
        (lambda x, library: [torch.empty(3)], "aten.empty"),
        (lambda x, library: [x.new_empty(3, device="meta")], "aten.new_empty"),
        (lambda x, library: [torch.ones(3).new_empty(3)], "lies in no tensor"),
        (lambda x, library: [None] * int(x.sum().item() > 0), "aten"),
        (lambda x, library: [x.view(torch.int32).clone()], "a view of another dtype"),
        (lambda x, library: library.launch(1) and [], "lies in no tensor"),
    ],
    ids=["arithmetic", "allocation", "device", "like another", "value", "of a view", "address"],
)
def test_what_cannot_be_repeated_is_named(
    run: Callable[..., Any], reason: str, library: Library
) -> None:
    x = torch.ones(SIZE)
    assert reason in refusal(library, lambda: run(x, library), (x,))


def test_a_result_in_the_memory_of_a_saved_tensor_is_refused(library: Library) -> None:
    x = torch.ones(SIZE)
    one = recorder.Recorder(0, library)
    assert one.record(lambda: [x[1:]], (), [x]).repeat is None
    assert "shares the memory" in str(one.problem)


def test_a_native_call_that_is_not_recorded_is_noticed(library: Library) -> None:
    def run() -> Sequence[torch.Tensor]:
        library.unheard += 1
        return ()

    assert "not recorded" in refusal(library, run)


def test_two_tensors_in_one_memory_are_not_told_apart(library: Library) -> None:
    x = torch.ones(SIZE)
    assert "same memory" in refusal(library, lambda: (), (x, x[2:]))


def test_a_tensor_without_elements_has_no_address(library: Library) -> None:
    assert "without elements" in refusal(library, lambda: (), (torch.ones(0, 8),))


def test_nothing_is_recorded_during_a_capture(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert "captured" in refusal(library, lambda: ())


@pytest.mark.usefixtures("library")
def test_the_allocations_of_other_threads_and_devices_are_not_noted() -> None:
    noted: list[object] = []

    def note(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        noted.append(dtype)
        return torch.empty_strided(size, stride, dtype=dtype)

    with memory.noting(0, note):
        with ThreadPoolExecutor(1) as pool:
            pool.submit(memory.allocator(0), SIZE, STRIDE, torch.uint8).result()
            pool.submit(lambda: memory.allocator_now(0)()(SIZE, STRIDE, torch.uint8)).result()
        memory.allocator(0)(SIZE, STRIDE, torch.int8)
    with memory.noting(1, note):
        memory.allocator(0)(SIZE, STRIDE, torch.int16)
    assert noted == [torch.int8]


def test_copies_of_numbers_that_are_results_are_made_by_one_operator(library: Library) -> None:
    """Where the last of them was. A number that a later call is given is copied before that, and
    what is more than a number by itself."""
    x, pair = torch.ones(SIZE), torch.ones(2)
    numbers = torch.arange(1.0, 8.0)[::2].split(1)  # as slots lie in a state

    def run() -> Sequence[torch.Tensor]:
        results = []
        for number in numbers:
            library.launch(x, number)
            results.append(number.clone())
        library.launch(numbers[1])
        return (*results, pair.clone())

    program, problem = record(library, run, (x,), (), (*numbers, pair))
    assert problem is None
    done = [step for step in program.steps if step[0] in ("launch", "call")]
    (copy,) = {step[1] for step in done if step[0] == "call"} - {torch.clone}
    assert done == [
        *(("launch", 0, 1), ("launch", 0, 2), ("call", torch.clone, [2]), ("launch", 0, 3)),
        *(("launch", 0, 4), ("call", copy, [1, 3, 4]), ("launch", 2), ("call", torch.clone, [5])),
    ]
    results = [step for step in program.steps if step[0] in ("result", "view")]
    whole, views = copy(numbers[0], numbers[2], numbers[3]), [results[at] for at in (0, 2, 3)]
    assert [step[0] for step in results] == ["view", "result", "view", "view", "result"]
    found = [whole.as_strided(size, stride, offset) for _, _, size, stride, offset in views]
    assert torch.equal(torch.cat(found), torch.tensor([1.0, 5.0, 7.0]))
    offsets = [each.storage_offset() * each.itemsize for each in found]
    assert all(offset % recorder.ALIGNMENT_OF_ALLOCATIONS == 0 for offset in offsets)


def test_a_copy_that_is_read_is_made_by_itself(library: Library) -> None:
    numbers = [torch.ones(1), torch.ones(1)]

    def run() -> Sequence[torch.Tensor]:
        first, second = (number.clone() for number in numbers)
        library.launch(first)
        return first, second

    made = steps(library, run, (), (), numbers)
    assert [step[:2] for step in made[:3]] == [("call", torch.clone)] * 2 + [("launch", 2)]


def test_no_library_is_built_to_record_a_product_in_high_precision(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "_loaded", [])
    monkeypatch.setattr(native, "missing", lambda device: None)
    desc = GemmDesc(None, None, torch.bfloat16)
    assert CudaBackend().recorder(desc, torch.device("cuda", 0)) is None
    assert not native.is_loaded()
