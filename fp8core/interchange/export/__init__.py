"""Models for other runtimes: :func:`to_onnx` writes an ONNX file.

torch.export and AOTInductor take models of fp8core as they are; docs/export.md shows all three.
"""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import os
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind, TensorArgument
from torch.fx import Node
from torch.fx.node import map_arg
from torch.overrides import TorchFunctionMode

from fp8core import errors
from fp8core.context.autocast import autocast
from fp8core.dispatch.policy import use_backend
from fp8core.errors import OperandError, RecipeError, UnsupportedError
from fp8core.interchange.export import operands
from fp8core.modules.models.inventory import layers_in
from fp8core.recipe import Recipe
from fp8core.torch_ops.encoding import decode
from fp8core.torch_ops.private import FakeTensor, pytree, schema_of

__all__ = ["onnx_export", "to_onnx"]
__dir__ = partial(sorted, __all__)

_export = torch.onnx.export
_CONSTANTS = (bool, int, float, complex, str, type(None))
_ABSENT = object()
_DATA: Any = torch.Tensor.data  # the property


def capture(
    model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], dynamic_shapes: Any
) -> ExportedProgram:
    """Return the program of ``model``, which is left as it was.

    Raises:
        UnsupportedError: forward assigns to ``data`` of a tensor, or changes a number, a string or
            None that a module holds.
    """
    with _DataInGraph(), _restored_attributes(model):
        program: ExportedProgram = torch.export.export(
            model, tuple(args), dict(kwargs), dynamic_shapes=dynamic_shapes
        )
    return program


class _DataInGraph(TorchFunctionMode):
    """Reads ``tensor.data`` as ``tensor.detach()``, whose writes are in the graph: torch 2.13
    captures no other use of ``data``."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if func == _DATA.__get__:
            return args[0].detach()
        if func == _DATA.__set__:
            raise UnsupportedError(
                f"to_onnx: forward assigns to .data of a tensor {list(args[0].shape)}, and a file "
                f"holds no state. Export a model that computes a new tensor instead."
            )
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _restored_attributes(model: torch.nn.Module) -> Iterator[None]:
    """Refuse changes of constants by forward, and remove what it adds; torch puts back the rest."""
    names = {module: set(vars(module)) for module in model.modules()}
    before: dict[str, Any] = {}

    def begin(*ignored: object) -> None:
        before.update(_constants(model))

    def end(*ignored: object) -> None:
        after = _constants(model)
        for name in {**before, **after}:
            old, new = before.get(name, _ABSENT), after.get(name, _ABSENT)
            if old is not new and old != new:
                raise _changed(name, old, new)

    hooks = [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for module, before_forward in names.items():
            for name in set(vars(module)) - before_forward:
                del vars(module)[name]


def _constants(model: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes of modules that a graph takes for constants, by path."""
    constants = {}
    path: Any
    for name, module in model.named_modules():
        for path, value in pytree.tree_flatten_with_path(vars(module))[0]:
            if type(value) in _CONSTANTS:
                attribute = f"{path[0].key}{pytree.keystr(path[1:])}"
                constants[f"{name}.{attribute}" if name else attribute] = value
    return constants


def _changed(name: str, old: object, new: object) -> UnsupportedError:
    was, is_now = ("absent" if value is _ABSENT else repr(value) for value in (old, new))
    return UnsupportedError(
        f"to_onnx: forward changes {name!r} ({was} before, {is_now} after), which a file would "
        f"hold as a constant. Call the model once before if forward sets it once; else export a "
        f"model that does not change it."
    )


_CONSTANT_INPUTS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
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
    _forget_sources(program)
    _drop_seeds(program)
    program = _functional(program)
    _refuse_writes(program)
    _drop_unused(program)
    _refuse_operators(program)
    _Folding(program).run()
    for node in program.graph.nodes:
        name = _operator_name(node)
        if name is not None:
            node.target = operands.LOWERED[name]
    program.graph_module.recompile()
    _forget_sources(program)
    result: ExportedProgram = program.run_decompositions(operands.DECOMPOSITIONS)
    _forget_sources(result)
    return result


def _forget_sources(program: ExportedProgram) -> None:
    """Drop which nodes of earlier passes each node is from: no file holds it, and every pass of
    torch copies it for each node."""
    for node in program.graph.nodes:
        node.meta.pop("from_node", None)


def _operator_name(node: Node) -> str | None:
    """Return the name of fp8core's operator that ``node`` calls, None for another's."""
    namespace, _, rest = str(node.target).partition(".")  # fp8core.norm.default
    return rest.partition(".")[0] if namespace == _NAMESPACE else None


def _drop_seeds(program: ExportedProgram) -> None:
    """Remove the draws of seeds that no rounding uses, which are ordered effects for torch."""
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
        refusal = (
            _refusal_of_draw(node) if name is None else operands.refusal_of_call(name, node.args)
        )
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
        if spec.kind in _CONSTANT_INPUTS and not node.users:
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
            if spec.kind in _CONSTANT_INPUTS and spec.target is not None:
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
            desc: Any = decode(str(arguments[0])).desc
            a, b = arguments[1:3]
            arguments[1:3] = self._operands(desc.a, a, 1), self._operands(desc.b, b, None)
        if name == "dequantize":
            desc = decode(str(arguments[0])).desc
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
        names = itertools.chain((name,), (f"{name}_{at}" for at in itertools.count(1)))
        name = next(each for each in names if each not in self.program.constants)
        value = value.detach().contiguous()
        self.program.constants[name] = value
        with self.graph.inserting_before(self.first):
            node: Node = self.graph.placeholder("b_" + name.replace(".", "_"))
        node.meta["val"] = self.mode.from_tensor(value, static_shapes=True)
        spec = InputSpec(InputKind.BUFFER, TensorArgument(node.name), name, persistent=False)
        self.inputs.append((node, spec))
        return node


_OPSET = 21
_NEEDED = ("onnx", "onnxscript")


def to_onnx(
    model: torch.nn.Module,
    args: Sequence[Any],
    path: str | os.PathLike[str],
    recipe: Recipe | str | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    dynamic_shapes: Any = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    opset_version: int = _OPSET,
) -> torch.onnx.ONNXProgram:
    """Write ``model``, called with ``args``, as the ONNX file ``path``, and return its program.

    Weights are stored as the codes and scales that forward uses, inputs are quantized by
    QuantizeLinear nodes with scales from their own amax, and a GEMM is a MatMul of dequantized
    values in float32. Codes and scales are those of the ``reference`` backend bit for bit, sums of
    a runtime in its own order.

    Args:
        model: on the CPU, in eval mode.
        args: example inputs, positional; their sizes are fixed where ``dynamic_shapes`` frees none.
        path: where the file is written; weights beyond 2 GB lie beside it.
        recipe: as in ``autocast``; None leaves the recipe that is active, or that of ``convert``.
        kwargs: example inputs by keyword.
        dynamic_shapes: as in ``torch.export.export``.
        input_names: of the inputs in the file; by default those of forward.
        output_names: of the outputs in the file.
        opset_version: of the file, from 21 on: earlier ones quantize no blocks.

    Raises:
        UnsupportedError: the model or its recipe holds what ONNX has no translation of, by name.
        OperandError: the model is training or not on the CPU.
        RecipeError: the recipe has no such name, or the opset is too old.
        ImportError: ``onnx`` or ``onnxscript`` is not installed.
    """
    _check(model, opset_version)
    scope = contextlib.nullcontext() if recipe is None else autocast(recipe=recipe)
    with warnings.catch_warnings():
        # torch's own exporter copies a container that torch has deprecated (torch 2.13).
        warnings.filterwarnings("ignore", ".*LeafSpec.* is deprecated", FutureWarning)
        with torch.no_grad(), use_backend("reference"), scope:
            # Copies: torch takes an input that is given twice for one.
            positional, named = pytree.tree_map_only(
                torch.Tensor, torch.clone, (tuple(args), dict(kwargs or {}))
            )
            lowered = lower(capture(model, positional, named, dynamic_shapes))
        exported = _export(
            lowered,
            input_names=input_names,
            output_names=output_names,
            opset_version=opset_version,
            dynamo=True,
            verbose=False,
        )
    assert exported is not None  # dynamo=True returns it
    exported.save(path)
    return exported


# Options of torch.onnx.export that to_onnx has by another name or takes at these values.
_OPTIONS = {"kwargs", "dynamic_shapes", "input_names", "output_names", "opset_version"}
_FIXED = {"dynamo": True, "export_params": True, "external_data": True, "verbose": False}
_FIXED |= {"do_constant_folding": True, "keep_initializers_as_inputs": False}


@contextlib.contextmanager
def onnx_export(enabled: bool = False) -> Iterator[None]:
    """Have ``torch.onnx.export`` of a model with layers of fp8core write as ``to_onnx`` does.

    As in Transformer Engine, whose name this is: ``with autocast(recipe=...), onnx_export(True):
    torch.onnx.export(model, args, path)``. Other models are exported as torch exports them.

    Raises:
        UnsupportedError: in a call of ``torch.onnx.export``: there is no file, or an option has a
            value that ``to_onnx`` does not take.
    """
    plain = torch.onnx.export

    def export(model: Any, args: Any = (), f: Any = None, **options: Any) -> Any:
        is_ours = isinstance(model, torch.nn.Module) and bool(layers_in(model))
        if not is_ours:
            return plain(model, args, f, **options)
        refused = {n: v for n, v in options.items() if n not in _OPTIONS and v != _FIXED.get(n)}
        refused |= {"f": None} if f is None else {}
        for name, value in refused.items():
            raise UnsupportedError(
                f"torch.onnx.export({name}={value!r}) of a model of fp8core: export.to_onnx "
                f"takes a path, and {', '.join(sorted(_OPTIONS))}."
            )
        passed = {name: value for name, value in options.items() if name in _OPTIONS and value}
        positional = args if isinstance(args, tuple) else (args,)
        return to_onnx(model, positional, f, **passed)

    if enabled:
        torch.onnx.export = export
    try:
        yield
    finally:
        torch.onnx.export = plain


def _check(model: torch.nn.Module, opset_version: int) -> None:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ImportError(
            f"to_onnx needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} "
            f"not installed: pip install {' '.join(missing)}."
        )
    if opset_version < _OPSET:
        raise RecipeError(
            f"to_onnx: opset_version={opset_version} quantizes no blocks. Use {_OPSET} or later."
        )
    if model.training:
        raise OperandError("to_onnx: the model is training. Call model.eval() first.")
    elsewhere = [
        (name, tensor.device)
        for tensors in (model.named_parameters(), model.named_buffers())
        for name, tensor in tensors
        if tensor.device.type != "cpu"
    ]
    if elsewhere:
        name, device = elsewhere[0]
        raise OperandError(
            f"to_onnx: {name!r} is on {device}, but weights are quantized on the CPU. Call "
            f"model.cpu() first."
        )
