"""Which cases call which native entries, and under which of compute-sanitizer's tools they run."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.backends.cuda.sanitize import cases, training

BINDINGS = Path(__file__).resolve().parents[4] / "csrc" / "bindings"
TOOLS = {
    "memcheck": "accesses outside of an allocation",
    "racecheck": "races in shared memory",
    "synccheck": "barriers that not all threads reach",
    "initcheck": "reads of what nobody wrote",
}


def _foreign(library: str, **more: str) -> dict[str, str]:
    """The tools that a group with another library's kernels is not run under, and why."""
    reason = f"{library}'s kernels, which nobody here can repair"
    return {tool: more.get(tool, reason) for tool in ("racecheck", "synccheck", "initcheck")}


_CUBLASLT = _foreign("cuBLASLt", racecheck="a kernel of cuBLASLt dies under it")


@dataclasses.dataclass(frozen=True)
class Group:
    """Cases that run in one go.

    Attributes:
        run: calls the cases, which raise if they do not run as they should.
        entries: the native entries that they call, as ``Class.method`` or ``function``.
        left_out: tools that do not run them, and why.
    """

    run: Callable[[], None]
    entries: tuple[str, ...]
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)


GROUPS = {
    "quantize": Group(cases.quantize, ("Quantize.__call__", "Quantize.and_sum")),
    "parts": Group(cases.parts, ("Amax.partials",)),
    "fused_parts": Group(cases.fused_parts, ("add_tile_sums",)),
    "amax_and_scale_update": Group(
        cases.amax_and_scale_update, ("Amax.__call__", "ScaleUpdate.__call__")
    ),
    "activations": Group(cases.activations, ("Activation.__call__",)),
    "fused_activations": Group(
        cases.fused_activations,
        (
            "QuantizeActivation.__call__",
            "QuantizeActivation.halves",
            "QuantizeActivationMxfp8.__call__",
            "QuantizeActivationNvfp4.__call__",
        ),
    ),
    "dequantize_and_column_sums": Group(
        cases.dequantize_and_column_sums, ("Dequantize.__call__", "ColumnSums.__call__")
    ),
    "transposed_codes": Group(cases.transposed_codes, ("Transpose.__call__",)),
    "microscaling": Group(
        cases.microscaling, ("QuantizeMxfp8.__call__", "QuantizeNvfp4.__call__", "arrange_scales")
    ),
    "device_groups": Group(cases.device_groups, ("GroupedGemm.__call__", "store_group_offsets")),
    "norms": Group(cases.norms, ("Norm.__call__", "Norm.backward")),
    "fused_norms": Group(cases.fused_norms, ("QuantizeNorm.__call__",)),
    "rotary": Group(cases.rotary, ("Rotary.__call__",)),
    "cross_entropy": Group(
        training.cross_entropy, ("CrossEntropy.__call__", "CrossEntropy.backward")
    ),
    "permutation": Group(
        training.permutation,
        (
            "route_by_mask",
            "route_by_rows",
            "Rows.dispatch",
            "Rows.combine",
            "Rows.combine_backward",
        ),
    ),
    "router": Group(training.router, ("Router.__call__", "Router.backward")),
    "steps": Group(training.steps, ("Adam.__call__",)),
    "replays": Group(training.replays, ("Program.__call__",)),
    "single_queries": Group(cases.single_queries, ("SingleQuery.__call__",)),
    "single_queries_of_masks": Group(cases.single_queries_of_masks, ("SingleQuery.__call__",)),
    "single_queries_in_pages": Group(cases.single_queries_in_pages, ("SingleQuery.__call__",)),
    "steps_of_a_cache": Group(cases.steps_of_a_cache, ("SingleQuery.__call__",), _foreign("torch")),
    "few_rows": Group(cases.few_rows, ("Gemm.run",)),
    "gemm": Group(cases.gemm, ("Gemm.run", "Gemm.milliseconds"), _CUBLASLT),
    "repeated_layers": Group(training.repeated_layers, ("Program.__call__", "Gemm.run"), _CUBLASLT),
    "attention": Group(training.attention, (), _foreign("cuDNN")),
}

ON_HOST = frozenset(
    (
        *("Quantize.tile_sums_floats", "QuantizeActivation.tile_sums_floats"),
        *("QuantizeActivationMxfp8.tile_sums_floats", "QuantizeActivationNvfp4.tile_sums_floats"),
        *("ColumnSums.workspace_floats", "Norm.backward_partials", "route_workspace_ints"),
        *("tile_bytes", "OperandDesc.__str__", "GemmDesc.__str__", "Gemm.workspace_bytes"),
        *("Gemm.algorithm", "Gemm.add_candidate", "Launch.addresses", "Launch.set_places"),
        *("Program.add_leading", "Program.add_saved", "Program.add_constant", "Program.add_empty"),
        *("Program.add_launch", "Program.add_call", "Program.add_release", "Program.add_result"),
        *("Program.add_view", "listening", "num_unheard"),
    )
)
"""Entries that compute sizes, texts and choices, or note calls: they enqueue nothing."""

_DEFINITION = re.compile(
    r'py::class_<[^;]*?>\(\s*module,\s*"(?P<name>\w+)"\)'
    r'|(?P<on_module>module)?\s*\.def\(\s*"(?P<entry>\w+)"'
    r"|;"
)


def entries_in(source: str) -> set[str]:
    """The entries that a file of bindings defines: functions of the module, methods of classes."""
    found, current = set(), None
    for match in _DEFINITION.finditer(source):
        if match["name"]:
            current = match["name"]
        elif match["entry"]:
            is_function = match["on_module"] or current is None
            found.add(match["entry"] if is_function else f"{current}.{match['entry']}")
    return found


def entries() -> set[str]:
    """All entries of the native library, by its bindings."""
    return set().union(*(entries_in(file.read_text("utf-8")) for file in BINDINGS.glob("*.cpp")))


def groups_of(tool: str) -> list[str]:
    """The groups that a tool runs."""
    return [name for name, group in GROUPS.items() if tool not in group.left_out]


def _count(calls: Counter[str], entry: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counting(*arguments: Any, **keywords: Any) -> Any:
        calls[entry] += 1
        return function(*arguments, **keywords)

    return counting


def counted(library: Any) -> Counter[str]:
    """Count the calls of all entries of ``library`` from now on, by entry."""
    calls: Counter[str] = Counter()
    for entry in entries():
        owner, _, method = entry.rpartition(".")
        holder = getattr(library, owner) if owner else library
        setattr(holder, method, _count(calls, entry, getattr(holder, method)))
    return calls


def table() -> Iterator[str]:
    """The lines of a table of groups, the entries they call, and their tools."""
    yield f"| group | native entries | {' | '.join(TOOLS)} |"
    yield "|---|---|" + "---|" * len(TOOLS)
    for name, group in GROUPS.items():
        called = ", ".join(f"`{entry}`" for entry in group.entries)
        marks = [group.left_out.get(tool, "runs") for tool in TOOLS]
        yield f"| {name} | {called} | {' | '.join(marks)} |"
