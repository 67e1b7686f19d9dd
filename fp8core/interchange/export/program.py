"""An exported program without fp8core's operators: constants computed, the others replaced."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, TensorArgument
from torch.fx import Node
from torch.fx.node import map_arg
from torch.onnx import ops
from torch.overrides import TorchFunctionMode

from fp8core import errors
from fp8core.backend_api import OperandSpec
from fp8core.errors import UnsupportedError
from fp8core.interchange.export import operands
from fp8core.torch_ops.definition import Tensors, implementation
from fp8core.torch_ops.encoding import decode
from fp8core.torch_ops.private import FakeTensor, schema_of

_Optional = torch.Tensor | None

# Operators whose arithmetic torch translates.
_TRACED = (
    *("norm", "activation", "rotary", "router", "route"),
    *("dispatch_rows", "combine_rows", "cross_entropy", "column_sums"),
)


def operand_specs(text: str) -> tuple[OperandSpec | None, OperandSpec | None]:
    """Return how the operands of a GEMM are quantized."""
    desc: Any = decode(text).desc
    return desc.a, desc.b


def refusal_of(name: str, arguments: Sequence[Any]) -> str | None:
    """Say why the operator ``name``, called with these, has no translation; None if it has."""
    if name not in LOWERED:
        return f"fp8core.{name} has no translation to ONNX"
    desc: Any = decode(arguments[0]).desc
    if name == "attention":
        return _refusal_of_attention(desc)
    if name == "quantize":
        *_, scale, amax, _, nonfinite, by_amax = (*arguments, None, None)[:8]
        if scale is not None or amax is not None:
            return "delayed scaling changes its scales in every call"
        if nonfinite is not None:
            return 'nonfinite="propagate" counts what a cast meets, and ONNX keeps no counts'
        if by_amax is not None:
            return "an amax that several ranks share needs their collectives"
        if desc.rowwise is None:
            return "a columnwise operand alone belongs to backward"
        return operands.refusal_of(desc.rowwise)
    if name in ("gemm", "grouped_gemm"):
        if desc.accumulate or getattr(desc, "contract_groups", False):
            return "a GEMM of backward has no translation"
        refusals = [operands.refusal_of(spec) for spec in (desc.a, desc.b) if spec is not None]
        return next(filter(None, refusals), None)
    if name == "dequantize":
        return operands.refusal_of(desc.operand)
    return None


def _refusal_of_attention(desc: Any) -> str | None:
    if desc.qkv is not None or desc.s is not None or desc.out is not None:
        return "FP8 attention quantizes within the softmax, which is not translated"
    if desc.dropout:
        return "attention with dropout is training; call model.eval() first"
    return None


def _quantize(
    text: str, x: torch.Tensor, offsets: Sequence[int] | None, *ignored: object
) -> list[torch.Tensor]:
    desc: Any = decode(text).desc
    spec: OperandSpec = desc.rowwise
    if offsets is None:
        return operands.cast(spec, x)
    # ONNX concatenates and splits no FP8, so groups are handed over in float32, dequantized.
    groups = [x[start:end] for start, end in itertools.pairwise(offsets) if end > start]
    values = [operands.dequantized(spec, operands.cast(spec, group)) for group in groups]
    unit = x.new_ones((), dtype=torch.float32)
    return [torch.cat(values) if values else x.to(torch.float32), unit, unit]


def _dequantize(text: str, operand: Tensors) -> torch.Tensor:
    desc: Any = decode(text).desc
    return operands.dequantized(desc.operand, operand).to(desc.dtype)


def _values(spec: OperandSpec | None, operand: Tensors) -> torch.Tensor:
    if spec is not None and operand[0].dtype == operands.value_dtype(spec):
        return operands.dequantized(spec, operand)
    wide = torch.float64 if operand[0].dtype == torch.float64 else torch.float32
    return operand[0].to(wide)


def _gemm(text: str, a: Tensors, b: Tensors, bias: _Optional) -> torch.Tensor:
    desc: Any = decode(text).desc
    product = _values(desc.a, a) @ _values(desc.b, b).t()  # [m, k] x [n, k] -> [m, n]
    if bias is not None:
        product = product + bias.to(product.dtype)
    return product.to(desc.out_dtype)


def _grouped_gemm(
    text: str, a: Tensors, b: Tensors, offsets: Sequence[int], biases: Tensors
) -> list[torch.Tensor]:
    """Compute a GEMM for each group; the sizes of groups are part of the graph."""
    desc: Any = decode(text).desc
    step = len(b) // (len(offsets) - 1)
    products = []
    for group, (start, end) in enumerate(itertools.pairwise(offsets)):
        if start == end:
            continue
        part, bias = [a[0][start:end]], biases[group] if biases else None
        products.append(_gemm(text, part, b[group * step : (group + 1) * step], bias))
    if not products:
        return [a[0].new_zeros(0, b[0].shape[0], dtype=desc.out_dtype)]
    return [torch.cat(products)]


class _SumsInFloat32(TorchFunctionMode):
    """Leaves out conversions to float64, in which the reference backend sums products of float32:
    few runtimes are fast there."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        keywords = kwargs or {}
        if func is torch.Tensor.to and torch.float64 in (*args[1:2], keywords.get("dtype")):
            return args[0]
        return func(*args, **keywords)


def _attention(*arguments: Any) -> Any:
    with _SumsInFloat32():
        return implementation("attention")(*arguments)


LOWERED: dict[str, Callable[..., Any]] = {
    "quantize": _quantize,
    "dequantize": _dequantize,
    "gemm": _gemm,
    "grouped_gemm": _grouped_gemm,
    "attention": _attention,
    **{name: implementation(name) for name in _TRACED},
}
"""The function of each operator that has a translation, by the operator's name."""


def _sort(
    x: torch.Tensor, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> Sequence[torch.Tensor]:
    """Sort by TopK, which leaves equal values in their order."""
    # Runtimes have TopK of few types; conversions to these keep order and values.
    narrow = torch.float32 if x.is_floating_point() else torch.int64
    wide = x.dtype if x.dtype == torch.float64 else narrow
    values, indices = ops.symbolic_multi_out(
        "TopK",
        (x.to(wide), torch.full((1,), x.shape[dim], dtype=torch.int64)),
        {"axis": dim % x.dim(), "largest": int(descending)},
        dtypes=(wide, torch.int64),
        shapes=(x.shape, x.shape),
    )
    return values.to(x.dtype), indices


def _argsort(x: torch.Tensor, **keywords: Any) -> torch.Tensor:
    return _sort(x, **keywords)[1]


DECOMPOSITIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.sort.stable: _sort,
    torch.ops.aten.argsort.stable: _argsort,
}
"""The functions of torch's operators that its exporter does not translate."""


_CONSTANTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
_NAMESPACE = "fp8core"
# Arguments of torch's random operators that are 0 or False where nothing is drawn.
_SWITCHES = ("p", "dropout", "dropout_p", "train", "training")


def lower(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` in operators that torch translates to ONNX; ``program`` is used up.

    Nodes that depend on parameters alone are computed: weights are stored as their codes and
    scales.

    Raises:
        UnsupportedError: the program holds an operation without a translation, or writes a buffer.
    """
    _drop_seeds(program)
    program = _functional(program)
    _refuse_writes(program)
    _drop_unused(program)
    _refuse_operators(program)
    _Folding(program).run()
    for node in program.graph.nodes:
        name = _operator_name(node)
        if name is not None:
            node.target = LOWERED[name]
    program.graph_module.recompile()
    result: ExportedProgram = program.run_decompositions(DECOMPOSITIONS)
    return result


def _operator_name(node: Node) -> str | None:
    """Return the name of fp8core's operator that ``node`` calls, None for another's."""
    namespace, _, rest = str(node.target).partition(".")  # fp8core.norm.default
    return rest.partition(".")[0] if namespace == _NAMESPACE else None


def _drop_seeds(program: ExportedProgram) -> None:
    """Remove the draws of seeds that no rounding uses, which are ordered effects for torch.

    Raises:
        UnsupportedError: one is used.
    """
    program.graph.eliminate_dead_code()  # what would use one, but keeps what writes
    for node in program.graph.nodes:
        if _operator_name(node) != "draw_seed":
            continue
        if node.users:
            raise _refusal(node, "a seed is drawn in every call, and ONNX defines no such numbers")
        program.graph.erase_node(node)


def _functional(program: ExportedProgram) -> ExportedProgram:
    """Return ``program`` without writes: what is written, through views too, is a new value, and
    a result by the signature where state is written."""
    for name, value in program.state_dict.items():
        if isinstance(value, torch.nn.Parameter):
            # Codes of a quantized parameter become parameters, and integers have no gradients.
            program.state_dict[name] = torch.nn.Parameter(value.detach(), requires_grad=False)
    result: ExportedProgram = program.run_decompositions({})
    return result


def _refuse_writes(program: ExportedProgram) -> None:
    written = [
        spec.target
        for spec in program.graph_signature.output_specs
        if spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.TOKEN)
    ]
    if written:
        raise UnsupportedError(
            f"to_onnx: the model writes {_name_in_model(written[0])!r} when it runs, and a file "
            f"holds no state. Export one that writes no input, parameter or buffer."
        )


def _refuse_operators(program: ExportedProgram) -> None:
    for node in program.graph.nodes:
        name = _operator_name(node)
        if name == "refuse":  # a layer that could not be captured
            kind, message = node.args[2:4]
            raise getattr(errors, kind)(message)
        refusal = _refusal_of_draw(node) if name is None else refusal_of(name, node.args)
        if refusal is not None:
            raise _refusal(node, refusal)


def _refusal_of_draw(node: Node) -> str | None:
    """Say that torch's operator draws random numbers; None if it does not, as dropout of 0."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return None
    arguments = schema_of(node.target).arguments
    values = {argument.name: argument.default_value for argument in arguments}
    values |= dict(zip(values, node.args, strict=False)) | node.kwargs
    if any(values.get(name) == 0 for name in _SWITCHES):
        return None
    return (
        f"{node.target} draws random numbers in every call, and those of a runtime are others; "
        f"evaluate all of its modules, or draw them outside and pass them as an input"
    )


def _refusal(node: Node, reason: str) -> UnsupportedError:
    return UnsupportedError(
        f"to_onnx{_module_of(node)}: {reason}. torch.export.export takes the model as it is; "
        f"docs/export.md lists what ONNX takes."
    )


def _module_of(node: Node) -> str:
    """Return " of 'NAME'", the module that called for ``node``, or nothing if it has no name."""
    modules = list((node.meta.get("nn_module_stack") or {}).values())
    name = modules[-1][0] if modules else ""
    return f" of {name!r}" if name else ""


def _name_in_model(target: str | None) -> str:
    """Return the name of a parameter, buffer or input; torch calls the parts of a quantized
    parameter ``parametrizations.NAME.original0`` and so on."""
    return re.sub(r"parametrizations\.(\w+)\.original\d+$", r"\1", str(target))


def _drop_unused(program: ExportedProgram) -> None:
    """Remove nodes without users, and the inputs of constants that none uses."""
    graph, signature = program.graph, program.graph_signature
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    specs = []
    for node, spec in zip(placeholders, signature.input_specs, strict=True):
        if spec.kind in _CONSTANTS and not node.users:
            graph.erase_node(node)
        else:
            specs.append(spec)
    signature.input_specs[:] = specs
    used = {spec.target for spec in specs}
    for tensors in (program.state_dict, program.constants):
        for name in [name for name in tensors if name not in used]:
            del tensors[name]


class _Folding:
    """Computes what depends on constants alone, and makes the results inputs of the graph."""

    def __init__(self, program: ExportedProgram) -> None:
        self.program = program
        self.graph = program.graph
        self.values: dict[Node, Any] = {}
        self.names: dict[Node, str] = {}  # of the first parameter that a constant depends on
        self.inputs: list[tuple[Node, InputSpec]] = []
        self.stored: dict[tuple[Node, ...], list[Node]] = {}
        self.first = next(iter(self.graph.nodes))
        values = (node.meta.get("val") for node in self.graph.nodes)
        self.mode = next(value for value in values if isinstance(value, FakeTensor)).fake_mode

    def run(self) -> None:
        """Replace every constant that others than constants use."""
        self._read_constants()
        nodes = [node for node in self.graph.nodes if node.op not in ("placeholder", "output")]
        for node in nodes:
            if self._is_constant(node):
                self._compute(node)
        for node in nodes:
            if node not in self.values:
                self._hold_operands(node)
        for node in nodes:
            if node in self.values and any(user not in self.values for user in node.users):
                self._hold_value(node)
        specs = self.program.graph_signature.input_specs
        specs[:0] = [spec for _, spec in self.inputs]
        _drop_unused(self.program)
        self.graph.lint()

    def _read_constants(self) -> None:
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        specs = self.program.graph_signature.input_specs
        for node, spec in zip(placeholders, specs, strict=True):
            if spec.kind in _CONSTANTS and spec.target is not None:
                state = self.program.state_dict
                value = state.get(spec.target)
                self.values[node] = self.program.constants[spec.target] if value is None else value
                self.names[node] = _name_in_model(spec.target)

    def _is_constant(self, node: Node) -> bool:
        sources = node.all_input_nodes
        tags = getattr(node.target, "tags", ())
        if node.op != "call_function" or torch.Tag.nondeterministic_seeded in tags:
            return False
        return bool(sources) and all(source in self.values for source in sources)

    def _compute(self, node: Node) -> None:
        arguments, keywords = map_arg((node.args, node.kwargs), self.values.__getitem__)
        with torch.no_grad():
            self.values[node] = node.target(*arguments, **keywords)  # type: ignore[operator]  # it is a function
        self.names[node] = self.names[node.all_input_nodes[0]]

    def _hold_operands(self, node: Node) -> None:
        """Hold the constant operands of a node as exported graphs do, and its group offsets as
        numbers."""
        name = _operator_name(node)
        arguments = list(node.args)
        if name in ("gemm", "grouped_gemm"):
            text, a, b = arguments[:3]
            spec_a, spec_b = operand_specs(str(text))
            arguments[1:3] = self._operands(spec_a, a, 1), self._operands(spec_b, b, None)
        if name == "dequantize":
            desc: Any = decode(str(arguments[0])).desc
            arguments[1] = self._operands(desc.operand, arguments[1], 1)
        at = {"quantize": 2, "grouped_gemm": 3}.get(name or "")
        if at is not None and arguments[at] is not None:
            offsets: Any = arguments[at]
            if offsets not in self.values:
                raise UnsupportedError(
                    f"to_onnx{_module_of(node)}: the sizes of groups depend on the input, and the "
                    f"graph holds them as numbers. Pass m_splits as a list."
                )
            arguments[at] = self.values[offsets].tolist()
        node.args = tuple(arguments)

    def _operands(self, spec: Any, nodes: Any, count: int | None) -> list[Node]:
        """Return ``nodes``, the tensors of ``count`` operands (None: of any number), with the nodes
        of constant operands replaced."""
        if spec is None:
            return list(nodes)
        size = len(nodes) if count == 1 else 3 if spec.scale_format == "e4m3" else 2
        replaced: list[Node] = []
        for start in range(0, len(nodes), size):
            replaced += self._operand(spec, tuple(nodes[start : start + size]))
        return replaced

    def _operand(self, spec: Any, nodes: tuple[Node, ...]) -> Sequence[Node]:
        if not all(node in self.values for node in nodes):
            return nodes
        if nodes not in self.stored:
            tensors = operands.stored(spec, [self.values[node] for node in nodes])
            name = self.names[nodes[0]]
            parts = zip(("values", "scale_inv", "global_scale_inv"), tensors, strict=False)
            self.stored[nodes] = [self._add(f"{name}_{part}", tensor) for part, tensor in parts]
        return self.stored[nodes]

    def _hold_value(self, node: Node) -> None:
        value = self.values[node]
        if not isinstance(value, torch.Tensor):  # its parts are held
            return
        users = [user for user in node.users if user not in self.values]
        new = self._add(f"{self.names[node]}_{node.name}", value)
        for user in users:
            user.replace_input_with(node, new)

    def _add(self, name: str, value: torch.Tensor) -> Node:
        """Add a buffer to the program, and return the node of it."""
        name = next(
            candidate for candidate in _numbered(name) if candidate not in self.program.constants
        )
        value = value.detach().contiguous()
        self.program.constants[name] = value
        with self.graph.inserting_before(self.first):
            node: Node = self.graph.placeholder("b_" + name.replace(".", "_"))
        node.meta["val"] = self.mode.from_tensor(value, static_shapes=True)
        spec = InputSpec(InputKind.BUFFER, TensorArgument(node.name), name, persistent=False)
        self.inputs.append((node, spec))
        return node


def _numbered(name: str) -> Iterator[str]:
    yield name
    at = 1
    while True:
        yield f"{name}_{at}"
        at += 1
