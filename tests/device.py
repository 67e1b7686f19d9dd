"""Where the tensors of tests live: on the CPU, or on a GPU where TEST_DEVICE=cuda is set.

Tests name no device: :func:`tensors_on` makes one torch's default while they are collected and run.
What they draw has the numbers of the CPU on every device, so that a test that fails on one of them
had the same inputs as on the other.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

from tests import forked
from tests.ranks import DEVICE_TYPE, IMPORTS

DEVICE = torch.device("cuda", 0) if DEVICE_TYPE == "cuda" else torch.device("cpu")
"""For tests that have to name the device."""
BACKEND = "cuda" if DEVICE_TYPE == "cuda" else "reference"
"""The backend that runs on it where none is chosen."""

CUDA_WARNINGS = (
    "ignore:The AccumulateGrad node's stream",
    "ignore:The CUDA Graph is empty:UserWarning",
    "ignore:TensorFloat32 tensor cores:UserWarning",
    "ignore:Attempting to run cuBLAS, but there was no current CUDA context:UserWarning",
)
"""Of torch, about what tests do by intent on a GPU."""

_ORACLE = "the reference's bits; the conformance kit holds the cuda backend to bounds"
_STAND_IN = "the reference backend stands in for others on the CPU alone"
_THREAD = "backward of a GPU runs in a thread of autograd, in no autocast of the caller"
_BOTH_STORED = "Hopper multiplies codes along k alone, so that both orientations are stored"
NOT_ON_CUDA: dict[str, str] = {
    "tests/chain/test_attention_fallback.py": "about a backend for CUDA that runs on the CPU",
    "tests/chain/test_bias_gradient.py::"
    "test_backend_of_an_older_contract_leaves_it_to_the_reference": _STAND_IN,
    "tests/chain/test_bias_gradient.py::"
    "test_sums_come_with_the_cast_where_the_backend_offers_them": _STAND_IN,
    "tests/chain/test_linear_oracle.py::test_a_step_has_the_oracle_s_bits": _ORACLE,
    "tests/chain/test_linear_oracle.py::test_a_step_has_the_oracle_s_bits_in_other_dtypes": _ORACLE,
    "tests/chain/test_linear_oracle.py::"
    "test_float32_parameters_under_torch_autocast_have_the_oracle_s_bits": _ORACLE,
    "tests/chain/test_linear_oracle.py::test_three_delayed_steps_have_the_oracle_s_bits": _ORACLE,
    "tests/chain/test_linear_oracle.py::test_each_group_has_the_bits_of_a_tensor_of_its_own": (
        _ORACLE
    ),
    "tests/chain/test_padding.py::test_a_format_with_partial_blocks_is_not_padded": (
        "cuBLASLt takes multiples of 16, to which layers on a GPU pad all formats"
    ),
    "tests/chain/test_wgrad_rows.py": _STAND_IN,
    "tests/context/test_failed_steps.py::"
    "test_a_pass_that_raises_after_one_of_another_thread_ended_leaves_no_amax": (
        "passes of a GPU share a thread of autograd, in which one would wait for the other"
    ),
    "tests/context/test_capture.py::test_an_autocast_around_a_graph_break_holds[nested]": _ORACLE,
    "tests/context/test_timeline.py::test_a_hook_may_evaluate_the_layer_in_another_recipe": (
        "hooks of a GPU run in a thread of autograd, where no device is torch's default"
    ),
    "tests/context/test_timeline.py::"
    "test_a_thread_that_only_recomputed_says_nothing_of_forwards": _THREAD,
    "tests/context/test_timeline.py::test_a_recipe_around_forward_and_backward_is_repeated": (
        _THREAD
    ),
    "tests/context/test_timeline.py::test_another_recipe_around_backward_is_refused": _THREAD,
    "tests/conversion/test_single_query.py": _STAND_IN,
    "tests/conversion/test_first_step.py::test_a_substituted_backend_is_in_the_line": _STAND_IN,
    **{
        f"tests/test_permutation.py::{name}": (
            "makes tensors inside torch.func and torch.compile, where torch's default device fails"
        )
        for name in ("test_gradients_are_those_of_torch_func", "test_compiled_in_one_graph")
    },
    "tests/functional/test_quantizers.py::"
    "test_inner_tensors_are_those_of_a_quantized_tensor[usages0]": _BOTH_STORED,
    "tests/modules/test_delayed.py::test_a_step_that_no_backend_runs_keeps_the_state": (
        "about a backend for CUDA and the CPU"
    ),
    "tests/modules/test_golden.py::test_every_step_with_the_sums_of_hopper_is_theirs": _ORACLE,
    "tests/modules/test_golden_layers.py": _ORACLE,
    "tests/modules/test_held_for_backward.py::test_block_scaling_keeps_one_scale_a_block": (
        "cuBLASLt reads scales of blocks in strides of multiples of 4"
    ),
    "tests/modules/test_transformer_sequences.py::"
    "test_the_last_residual_of_a_post_ln_layer_is_added_with_the_norm": _STAND_IN,
    "tests/test_silent_failures.py::test_7_the_backend_cannot_run_it_and_another_does": _STAND_IN,
    "tests/tensors/test_quantized_tensor.py::"
    "test_nbytes_counts_codes_and_scales[current-15364]": _BOTH_STORED,
    "tests/tensors/test_quantized_tensor.py::"
    "test_nbytes_counts_codes_and_scales[block-15368]": _BOTH_STORED,
    "tests/tensors/test_scaling.py::test_an_infinite_amax_is_reported_with_the_layer": (
        "a kernel counts the amaxes that are not finite, and the host does not wait to log them"
    ),
    "tests/tensors/test_stored.py::test_memory_that_is_not_there_is_not_read": (
        "gloo reads the memory of the CPU"
    ),
    "tests/tensors/test_views.py::test_one_scale_a_tensor_takes_views_of_other_columns": (
        _BOTH_STORED
    ),
    "tests/tensors/test_views.py::"
    "test_usages_are_dropped_and_created_where_codes_are_the_same": _BOTH_STORED,
    "tests/tensors/test_views.py::test_rowwise_blocks_take_views_of_other_whole_blocks": (
        "a view of other columns cuts scales that lie in the order of the GPU's products"
    ),
    "tests/modules/test_overlap.py": "about a backend for the CPU that moves rows beside products",
    "tests/modules/test_meta.py": "about the meta device and the CPU",
    "tests/tensors/test_views.py::test_an_index_out_of_range_is_an_error": (
        "torch's kernel of an index asserts on the GPU, which ends CUDA in the process"
    ),
}
"""Tests of one device alone among those that ``python -m tests --gpu layers`` runs, and the reason:
a file, a function of it as pytest names it without parameters, or one of its tests."""
VALUES_ARE_READ = pytest.mark.skipif(
    DEVICE_TYPE == "cuda", reason="the values of tensors on a GPU are not read: that would wait"
)
"""Of tests in which the host refuses a tensor for its values."""

_DRAWS = {torch.randn, torch.rand, torch.randint, torch.randperm}
_TO_NUMPY = {torch.Tensor.numpy, torch.Tensor.__array__}
_ERROR = re.compile(r"^(?:[\w.]+\.)?(\w+Error): ", re.MULTILINE)
_ABSENT = {
    "UnsupportedError": re.compile(
        r"no backend runs .*\n(?:.*\n)*?.*?\b(cuda: .*)|.*\bcompute capability \d+\.\d+.*"
    ),
    "NotImplementedError": re.compile(
        r"Could not run '\w+::.*?CUDA\w*' backend|.* not implemented for.*"
    ),
}
"""What an error of a name says where it is about the device; a group is the part that says it."""
# A program given by its path, begun where a device is torch's default.
_BEGIN = """
import runpy, sys, torch
torch.set_default_device(sys.argv[1])
del sys.argv[:2]
sys.path.insert(0, sys.argv[0].rpartition("/")[0])
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class _Numbers(TorchFunctionMode):
    """Draw on the CPU what is asked of the default device, and give numpy what is on it."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DRAWS and kwargs.get("device") is None and "out" not in kwargs:
            needs_grad = kwargs.get("requires_grad", False)
            drawn = func(*args, **{**kwargs, "device": "cpu", "requires_grad": False})
            return drawn.to(self._device).requires_grad_(needs_grad)
        if func in _TO_NUMPY:
            return func(args[0].cpu(), *args[1:], **kwargs)
        return func(*args, **kwargs)


@contextlib.contextmanager
def tensors_on(device: str) -> Iterator[None]:
    """Put the tensors that name no device on ``device`` inside of this context."""
    if device == "cpu":
        yield
        return
    from_numpy, run = torch.from_numpy, threading.Thread.run

    def run_on_device(thread: threading.Thread) -> None:
        with torch.device(device), _Numbers(device):  # torch's modes are a thread's own
            run(thread)

    with pytest.MonkeyPatch.context() as patch, torch.device(device), _Numbers(device):
        patch.setattr(torch, "from_numpy", lambda array: from_numpy(array).to(device))
        patch.setattr(threading.Thread, "run", run_on_device)
        yield


def import_inductor() -> None:
    """Import what ``torch.compiler.reset()`` does: torch says of it that parts are deprecated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        importlib.import_module("torch._inductor.cudagraph_trees")


def reason_to_skip(nodeid: str) -> str | None:
    """The reason why a test does not run where the tensors of tests live, or None."""
    if DEVICE_TYPE == "cpu":
        return None
    names = (nodeid, nodeid.partition("[")[0], nodeid.partition("::")[0])
    return next((NOT_ON_CUDA[name] for name in names if name in NOT_ON_CUDA), None)


def absent(text: str) -> str | None:
    """What the last error of a traceback says that the GPU, or torch on it, lacks; else None."""
    errors = list(_ERROR.finditer(text))
    if DEVICE_TYPE == "cpu" or not errors or errors[-1][1] not in _ABSENT:
        return None
    found = _ABSENT[errors[-1][1]].search(text, errors[-1].end())
    return found and found[found.lastindex or 0].strip()


def skip_if_absent(error: BaseException) -> None:
    """Skip the test that raised ``error`` if that is about what the device lacks."""
    reason = absent(f"{type(error).__name__}: {error}")
    if reason is not None:
        pytest.skip(reason)


def assert_same_sums(
    got: Iterable[torch.Tensor], want: Iterable[torch.Tensor], *, in_fp8: bool = False
) -> None:
    """Assert that float32 sums of some 100 terms or less are the same, in bits on the CPU.

    A GPU's kernels each have an order of their own to add up in, and approximate exponentials, by
    which sums differ by some units of their last place, but where terms cancel. Its products
    ``in_fp8`` keep 14 bits of the largest term of 32 (Hopper; DeepSeek-V3, section 3.5.2).
    """
    for made, expected in zip(got, want, strict=True):
        if DEVICE_TYPE == "cpu":
            assert torch.equal(made, expected)
        elif in_fp8 and expected.numel():
            bound = 2.0**-13 * expected.abs().max().item()
            torch.testing.assert_close(made, expected, rtol=1e-5, atol=bound)
        else:
            torch.testing.assert_close(made, expected)


def let_go_of_backward_passes(device: torch.device = DEVICE) -> None:
    """Wait until autograd has let go of the backward passes that have ended.

    On a GPU that is its thread of the device, an instant after their callers go on, and before it
    takes up another pass: this is one.
    """
    torch.ones((), requires_grad=True, device=device).mul(1).backward()


def _close_checkpoints(error: BaseException | None) -> None:
    """Close torch's checkpoints whose forward raised ``error``.

    torch 2.11 leaves that to the end of the traceback, which pytest keeps: tests after this one
    would save their tensors there.
    """
    for frame, _ in traceback.walk_tb(error and error.__traceback__):
        if frame.f_code.co_filename == torch.utils.checkpoint.__file__:
            frame.clear()


@contextlib.contextmanager
def running_a_test() -> Iterator[None]:
    """Run a test: skip it for what the GPU lacks, and end the process with a GPU that it broke.

    After an assertion of a kernel or an illegal access, nothing runs on CUDA in this process. Of
    pytest's processes another one takes over, and the test is named.
    """
    try:
        yield
    except BaseException as error:
        # pytest.raises, of an error that says something else than the test expects.
        raised = error.__context__ if isinstance(error, AssertionError) else error
        for each in (error, error.__context__):
            _close_checkpoints(each)
        if isinstance(raised, NotImplementedError):
            skip_if_absent(raised)
        raise
    finally:
        if DEVICE_TYPE == "cuda" and torch.cuda.is_initialized():
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                print(f"CUDA cannot go on in this process: {error}", file=sys.stderr, flush=True)
                os._exit(1)


def run_program(
    path: Path,
    *arguments: str,
    folder: Path,
    options: Sequence[str] = (),
    device: str = DEVICE_TYPE,
) -> str:
    """What a file of Python prints in ``folder`` where ``device`` is torch's default."""
    begin = [] if device == "cpu" else ["-c", _BEGIN, device]
    return run(*options, *begin, str(path), *arguments, folder=folder)


def run(*arguments: str, folder: Path, num_devices: int = 1) -> str:
    """What Python prints for ``arguments`` in ``folder``; skip the test for what the GPU lacks.

    The process sees GPUs only if tests run on one: programs take the best device there is.
    """
    variables = {**os.environ, "OMP_NUM_THREADS": "1"}
    if DEVICE_TYPE == "cpu":
        variables["CUDA_VISIBLE_DEVICES"] = ""
    elif torch.cuda.device_count() < num_devices:
        pytest.skip(f"needs {num_devices} GPUs")
    # Optimizers import the compiler. An import that counts GPUs would keep the forks from them.
    imports = IMPORTS if DEVICE_TYPE == "cpu" else ()
    done = forked.run([sys.executable, *arguments], cwd=folder, env=variables, imports=imports)
    if done.returncode and (reason := absent(done.stderr)):
        pytest.skip(reason)
    assert done.returncode == 0, done.stderr
    return done.stdout
