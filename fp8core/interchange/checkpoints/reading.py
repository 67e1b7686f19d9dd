"""``load_pretrained``: a checkpoint of any layout into a model, whole or not at all."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from fp8core.conversion.convert import convert, unconvert
from fp8core.conversion.inference import (
    QuantizationReport,
    quantize_,
    refuse_training,
    unanswering,
)
from fp8core.conversion.layers import with_attributes_of
from fp8core.errors import Fp8CoreError, OperandError, UnsupportedError, did_you_mean
from fp8core.interchange.checkpoints.files import Checkpoint, Header
from fp8core.interchange.checkpoints.layouts import Piece, Stored, pieces_of, stored_names
from fp8core.interchange.checkpoints.stored import StoredWeight, method_of
from fp8core.interchange.checkpoints.writing import unwrapped
from fp8core.modules.models.inventory import flops_of, keyed_modules, layers_in
from fp8core.modules.models.prepare import prepare
from fp8core.modules.state.delayed import DelayedModule
from fp8core.recipe import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Recipe,
    WeightOnly,
)
from fp8core.reporting import log_once, logger, some
from fp8core.tensors.checks import is_sharded
from fp8core.tensors.delayed_state import BUFFERS

# Tensors of quantized layers that a checkpoint may hold and a forward here does not read: scales of
# activations, which are quantized by their own amax.
_UNREAD = ("input_scale", "activation_scale", "input_global_scale", "k_scale", "v_scale", "q_scale")
_STATIC = ("input_scale", "activation_scale")
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Loaded:
    """The report of :func:`load_pretrained`.

    Attributes:
        native: names of the parameters that hold the file's codes.
        dequantized: names of those that hold the values of the file's codes.
        recipe: the recipe whose forward multiplies the file's codes, None if the file holds none,
            or codes of several kinds.
        unread: scales of activations in the file.
    """

    native: tuple[str, ...]
    dequantized: tuple[str, ...]
    recipe: Recipe | None
    unread: tuple[str, ...]


class _Target(NamedTuple):
    """A parameter or buffer, with the modules and names that hold it."""

    value: torch.Tensor
    holders: list[tuple[torch.nn.Module, str]]

    def device(self, device: torch.device | str | None) -> torch.device:
        """Return where its value belongs: ``device``, the CPU if None, for one on meta."""
        return torch.device(device or "cpu") if self.value.is_meta else self.value.device


def load_pretrained(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    native: bool = False,
    *,
    device: torch.device | str | None = None,
) -> Loaded:
    """Load the checkpoint in ``directory``, of safetensors files, into ``model``.

    Weights that are stored as codes are dequantized to the parameter's dtype, rounded once from
    float32. With ``native`` the parameter becomes a :class:`fp8core.QuantizedTensor` of the file's
    codes; a layer of fp8core, or of a model that :func:`fp8core.convert` has converted, multiplies
    these in its forward under the ``recipe`` of the result. Everything is checked before the model
    is changed, except the values themselves, which are read tensor by tensor.

    Read are the methods ``fp8`` and ``compressed-tensors`` (``float-quantized``,
    ``mxfp8-quantized``, ``nvfp4-pack-quantized``), scales of any number of dimensions in float32,
    bfloat16, float16, uint8 and e8m0, and files that nothing is quantized in. Weights of experts
    that the model holds in one parameter of three dimensions are read from such a tensor, or from
    one for each expert under the names that transformers 5 merges.

    Parameters that are sharded over processes, as FSDP2 has them, take their rank's share: every
    rank reads the files, one tensor after the other, and calls no collective.

    Args:
        directory: with an index, or with one file.
        model: has the file's names in its ``state_dict``; parameters on meta get memory.
        native: keep the codes.
        device: where parameters on meta get it, each as it is read; None is the CPU.

    Raises:
        OperandError: files, or tensors that the model or the file needs, are missing or too many;
            files are damaged; shapes, scales or blocks do not fit the model or the config.
        UnsupportedError: a quantization method that is not read; with ``native``, codes that no
            recipe multiplies, or a sharded parameter.
    """
    where = f"load_pretrained({str(directory)!r})"
    plan = _plan(where, directory, model, device, native=native)
    model = unwrapped(model)
    with unanswering(where, model.modules()):
        plan.apply(device)
    for module in model.modules():
        if isinstance(module, DelayedModule):
            module.reset_delayed_state()
    return plan.loaded()


def load_quantized(
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    *,
    device: torch.device | str | None = None,
) -> QuantizationReport:
    """Load the checkpoint in ``directory``, of weights stored as codes, for inference.

    ::

        with accelerate.init_empty_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        fp8core.huggingface.load_quantized(directory, model, device="cuda")

    The layers whose weights the files hold as codes are converted as by :func:`fp8core.convert`,
    take the codes as they are, one tensor after the other, and are stored as by
    :func:`fp8core.quantize_`: no weight exists in high precision. Where the config leaves
    activations in high precision, the recipe is a :class:`~fp8core.recipe.WeightOnly`. Scales of
    activations that the files have for all layers (``input_scale``), beside a scale for each
    weight, are used as those of :class:`~fp8core.recipe.DelayedScaling`, and never change.

    Args:
        directory, model: as of :func:`load_pretrained`. The model is put into evaluation mode.
        device: where all parameters and buffers go; None leaves those with memory where they are.

    Raises:
        OperandError: the files hold no codes, or scales of activations that are none, or not the
            buffers on meta; as of :func:`load_pretrained` and :func:`fp8core.quantize_`. A model
            whose load was interrupted refuses to answer.
        UnsupportedError: activations of some layers alone are quantized; as of these functions.
    """
    where = f"load_quantized({str(directory)!r})"
    plan = _plan(where, directory, model, device, native=True)
    root = unwrapped(model)
    with _unchanged(where):
        recipe = plan.inference_recipe()
        _refuse_meta_buffers(root, device)
    refuse_training(where, root)
    layers = plan.native_layers
    convert(root, recipe, filter=lambda module, path: path in layers or not flops_of(module))
    try:
        with unanswering(where, root.modules()):
            model.eval()
            plan.apply(device, rows_alone=True)
            if device is not None:
                root.to(device)
            if isinstance(recipe, DelayedScaling):
                _set_scales(root, recipe, plan.take_input_scales())
            report = quantize_(root)
    except BaseException:
        unconvert(root)
        raise
    plan.loaded()
    return report


def _plan(
    where: str,
    directory: str | os.PathLike[str],
    model: torch.nn.Module,
    device: torch.device | str | None,
    *,
    native: bool,
) -> _Plan:
    """Return what of the files goes where in the model; changes nothing."""
    if not isinstance(model, torch.nn.Module):
        raise OperandError(f"{where}: the model is {model!r}, expected a torch.nn.Module.")
    checkpoint = Checkpoint(directory)
    if device is not None and torch.empty(0, device=device).is_meta:
        raise OperandError(f"{where}: device={device!r} has no memory for the values.")
    root: Any = unwrapped(model)
    if any(parameter.is_meta for parameter in root.parameters()):
        getattr(root, "tie_weights", tuple)()  # accelerate.init_empty_weights() unties
    with _unchanged(where):
        return _Plan(checkpoint, _targets(root), native=native)


@contextlib.contextmanager
def _unchanged(where: str) -> Iterator[None]:
    """Add to errors the call, and that it has changed nothing."""
    try:
        yield
    except Fp8CoreError as error:
        raise type(error)(f"{where}: {error} Nothing was loaded.") from None


def _refuse_meta_buffers(model: torch.nn.Module, device: torch.device | str | None) -> None:
    """Refuse buffers on meta that no checkpoint has, as they cannot go to ``device``."""
    if device is None:
        return
    saved = model.state_dict(keep_vars=True)
    named = model.named_buffers()
    on_meta = [name for name, buffer in named if buffer.is_meta and name not in saved]
    if on_meta:
        raise OperandError(
            f"{some(on_meta)} are buffers on meta, and in no checkpoint, as they are not "
            f"persistent. Give them values first, or build the model in "
            f"accelerate.init_empty_weights(), which leaves buffers alone."
        )


def _set_scales(
    model: torch.nn.Module, recipe: DelayedScaling, scales: Mapping[str, torch.Tensor]
) -> None:
    """Give the layers of ``scales``, by path, that scale of the input, by which is divided."""
    prepare(model, recipe)
    for path, layer in layers_in(model).items():
        if path in scales:
            layer.set_scale("input", 1 / scales[path])


def _targets(model: torch.nn.Module) -> dict[str, _Target]:
    """Return the tensors of the model's state_dict, but for the state of delayed scaling."""
    targets: dict[str, _Target] = {}
    holders: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    names = set(model.state_dict(keep_vars=True))
    for path, module in keyed_modules(model):
        for name, value in {**module._parameters, **module._buffers}.items():
            full = f"{path}.{name}" if path else name
            is_delayed = isinstance(module, DelayedModule) and name in BUFFERS
            if value is None or is_delayed or full not in names:
                continue
            if is_sharded(value) and value.is_meta:
                raise UnsupportedError(
                    f"{full!r} is sharded and on meta. Give the model memory first, by "
                    f"model.to_empty(device=...)."
                )
            shared = holders.setdefault(id(value), [])
            if (module, name) not in shared:
                shared.append((module, name))
            targets[full] = _Target(value, shared)
    return targets


class _Plan:
    """The tensors of the file for each tensor of the model, checked; reads headers and scales."""

    def __init__(
        self, checkpoint: Checkpoint, targets: dict[str, _Target], *, native: bool
    ) -> None:
        self._checkpoint = checkpoint
        headers = checkpoint.headers
        pieces = {
            name: pieces_of(name, target.value.shape, headers) for name, target in targets.items()
        }
        # Each tensor of the model under the first of its names that the file has.
        firsts: dict[int, str] = {}
        for name in (name for name in targets if pieces[name]):
            firsts.setdefault(id(targets[name].value), name)
        self._targets = {name: targets[name] for name in firsts.values()}
        # That name by each name of the tensor.
        self._firsts = {name: firsts.get(id(target.value)) for name, target in targets.items()}
        every = [piece.name for some_pieces in pieces.values() for piece in some_pieces]
        stored_by_name = {name: stored_names(name, headers) for name in every}
        used = {*every, *(name for stored in stored_by_name.values() for name in stored or ())}
        unused = [name for name in headers if name not in used]
        self._unread = tuple(name for name in unused if name.endswith(_UNREAD))
        missing = [name for name, target in targets.items() if id(target.value) not in firsts]
        missing += [name for name in every if stored_by_name[name] is None and name not in headers]
        _check_names(missing, [n for n in unused if n not in self._unread], targets)
        self._pieces = {piece.name: piece for name in self._targets for piece in pieces[name]}
        self._stored = {
            name: names for name in self._pieces if (names := stored_by_name[name]) is not None
        }
        self._weights = self._read_scales()
        for name, piece in self._pieces.items():
            if name not in self._stored:
                _check_plain(headers[name], piece, self._targets[piece.target].value)
        self._joined = self._join()
        self._differing = self._differing_ties(stored_by_name)
        self._recipe = _common_recipe(self._weights.values())
        self._native = self._keeping() if native else set()
        # Tensors whose pieces are being read, and how many are left.
        self._gathered: dict[str, tuple[torch.Tensor, int]] = {}

    def _read_scales(self) -> dict[str, StoredWeight]:
        """Return the quantized weights with their scales, each checked."""
        if not self._stored:
            return {}
        method = method_of(self._checkpoint.config())
        if method is None:
            raise OperandError(
                f"{some(list(self._stored))} hold codes, and config.json has no "
                f"quantization_config, which says how they are quantized."
            )
        small = [name for stored in self._stored.values() for name in stored[1:] if name]
        scales = dict(self._checkpoint.read(small))
        return {
            name: StoredWeight(
                name,
                self._pieces[name].shape,
                self._checkpoint.headers[stored.codes],
                scales[stored.scale],
                None if stored.outer is None else scales[stored.outer],
                method,
            )
            for name, stored in self._stored.items()
        }

    def _join(self) -> dict[str, StoredWeight | str]:
        """Return the weight of each parameter that the file holds as codes, or why they are none:
        the pieces of an expert's parameter may be stored in different ways."""
        joined: dict[str, StoredWeight | str] = {}
        for name in self._targets:
            pieces = [piece for piece in self._pieces.values() if piece.target == name]
            weights = [self._weights.get(piece.name) for piece in pieces]
            if pieces[0].place is None:
                if weights[0] is not None:
                    joined[name] = weights[0]
            elif any(weights):
                shape = tuple(self._targets[name].value.shape)
                joined[name] = StoredWeight.of_pieces(name, shape, weights)
        return joined

    def _differing_ties(self, stored_by_name: dict[str, Stored | None]) -> list[tuple[str, str]]:
        """Return pairs of names of one tensor of the model, the first of which is loaded, whose
        values differ in the file."""
        differing = []
        for name, first in self._firsts.items():
            if first in (None, name) or name not in stored_by_name:
                continue
            ours, theirs = (stored_by_name.get(n) or (n,) for n in (first, name))
            same = len(ours) == len(theirs) and all(map(self._is_same, ours, theirs))
            if not same:
                differing.append((first, name))
        return differing

    def _is_same(self, left: str | None, right: str | None) -> bool:
        """Return whether two tensors of the file have the same bytes."""
        if left is None or right is None:
            return left is right
        headers = self._checkpoint.headers
        if headers[left][1:] != headers[right][1:]:
            return False
        values = [value for _, value in self._checkpoint.read([left, right])]
        first, second = (value.reshape(-1).view(torch.uint8) for value in values)
        return torch.equal(first, second)

    def _keeping(self) -> set[str]:
        """Return the names of the parameters that keep the file's codes."""
        faults: dict[str, str] = {}
        for name, weight in self._joined.items():
            target = self._targets[name].value
            fault = weight if isinstance(weight, str) else weight.native_fault(target.dtype)
            if is_sharded(target):
                fault = "it is sharded over processes"
            if fault is not None:
                faults[name] = fault
        values = {name: self._targets[name].value for name in faults}
        flat = [name for name, value in values.items() if value.dim() == 2 or is_sharded(value)]
        if flat:
            raise UnsupportedError(
                f"the codes of {some(flat)} cannot be kept: {faults[flat[0]]}. "
                f"load_pretrained(native=False) dequantizes them."
            )
        if self._weights and self._recipe is None:
            raise UnsupportedError(
                "the file's weights are quantized in several ways, which no one recipe multiplies. "
                "load_pretrained(native=False) dequantizes them."
            )
        if faults:
            logger.warning(
                "weights of a checkpoint, %s, are dequantized: %s",
                some(list(faults)),
                next(iter(faults.values())),
            )
        return set(self._joined) - set(faults)

    def loaded(self) -> Loaded:
        """Return the report of what is loaded, and log the entries that are not read."""
        if self._unread:
            log_once(
                f"load_pretrained: {some(self._unread)} are not read: activations are quantized by "
                f"their own amax"
            )
        for first, name in self._differing:
            logger.warning(
                "load_pretrained: %r and %r are one tensor of the model, and differ in the "
                "checkpoint; the values of %r are loaded",
                *(first, name, first),
            )
        native = [name for name in self._joined if name in self._native]
        dequantized = [name for name in self._joined if name not in self._native]
        return Loaded(tuple(native), tuple(dequantized), self._recipe, self._unread)

    @property
    def native_layers(self) -> set[str]:
        """The paths of the layers that get the file's codes, several if they share a weight."""
        return {
            name.rpartition(".")[0] for name, first in self._firsts.items() if first in self._native
        }

    def inference_recipe(self) -> Recipe:
        """Return the recipe by which the config has layers compute. What it says of backward is
        left out: no such layer has one.

        Raises:
            OperandError: nothing keeps codes, or a scale of activations is none.
            UnsupportedError: activations of some layers alone are quantized.
        """
        if not self._native or self._recipe is None:
            raise OperandError(
                "the files hold no codes. Use load_pretrained(), then fp8core.quantize_()."
            )
        recipe: Any = self._recipe
        recipe = dataclasses.replace(recipe, backward_override=None)
        # Weights of one recipe are of one config.
        weights_alone = next(weight.method.weights_alone for weight in self._weights.values())
        if weights_alone is None:
            raise UnsupportedError(
                "the quantization_config leaves the activations of some layers in high precision, "
                "and those of others not. load_pretrained() reads the weights."
            )
        if weights_alone:
            return WeightOnly(recipe)
        is_static = self.input_scales.keys() == self.native_layers
        is_tensorwise = isinstance(recipe, Float8CurrentScaling)
        chosen: Recipe = DelayedScaling() if is_static and is_tensorwise else recipe
        return chosen

    @functools.cached_property
    def input_scales(self) -> dict[str, torch.Tensor]:
        """The static scales of inputs, float32 ``[1]``, by the path of the layer; a scale of zero
        is that of a layer which no input has reached, and is left out."""
        layers = itertools.product(self.native_layers, _STATIC)
        paths = {f"{path}.{suffix}": path for path, suffix in layers}
        scales = {}
        for name, read in self._checkpoint.read([name for name in paths if name in self._unread]):
            scale = read.float().reshape(-1)
            if scale.numel() != 1 or not bool(scale):
                continue
            if not bool((scale > 0) & scale.isfinite() & (1 / scale).isfinite()):
                raise OperandError(f"{name!r} is {scale.item()}, which is no scale.")
            scales[paths[name]] = scale
        return scales

    def take_input_scales(self) -> dict[str, torch.Tensor]:
        """Return :attr:`input_scales`, which then count as read."""
        scales = self.input_scales
        self._unread = tuple(n for n in self._unread if n.rpartition(".")[0] not in scales)
        return scales

    def apply(self, device: torch.device | str | None, *, rows_alone: bool = False) -> None:
        """Read the values tensor by tensor into the model, to ``device`` if it is on meta; with
        ``rows_alone`` codes are held in one orientation."""
        by_file = {stored.codes: name for name, stored in self._stored.items()}
        plain = {name: name for name in self._pieces if name not in self._stored}
        for key, value in self._checkpoint.read({**by_file, **plain}):
            piece = self._pieces[by_file.get(key, key)]
            target, weight = self._targets[piece.target], self._weights.get(piece.name)
            part = value
            if piece.target in self._native:
                part = value.view(torch.uint8)
            elif weight is not None:
                part = weight.values(value, target.value.dtype)
            whole = self._gather(piece, part)
            if whole is None:
                continue
            if piece.target in self._native:
                joined = self._joined[piece.target]
                assert isinstance(joined, StoredWeight)
                assert self._recipe is not None
                stored = joined.quantized(whole, self._recipe, target.value.dtype)
                if rows_alone:
                    stored.update_usage(columnwise_usage=False)
                # A move brings codes and scales into the layout of the device's backend.
                _replace(target, stored.to(target.device(device)))
            else:
                _fill(target, whole, device)

    def _gather(self, piece: Piece, value: torch.Tensor) -> torch.Tensor | None:
        """Return the whole tensor that ``piece`` completes; None while pieces of it are missing."""
        if piece.place is None:
            return value
        name = piece.target
        expert, start, rows = piece.place
        if name not in self._gathered:
            count = sum(piece.target == name for piece in self._pieces.values())
            shape = self._targets[name].value.shape
            self._gathered[name] = torch.empty(shape, dtype=value.dtype, device="cpu"), count
        whole, left = self._gathered.pop(name)
        whole[expert, start : start + rows] = value
        if left == 1:
            return whole
        self._gathered[name] = whole, left - 1
        return None


def _check_names(missing: list[str], unused: list[str], targets: dict[str, _Target]) -> None:
    problems = []
    if missing:
        problems.append(f"the checkpoint lacks {some(missing)}, which the model has")
    if unused:
        problems.append(f"it holds {some(unused)}, which the model has not")
    if problems:
        near = did_you_mean(unused[0], [*targets]) if not missing else ""
        raise OperandError(f"{'; '.join(problems)}.{near}")


def _check_plain(header: Header, piece: Piece, value: torch.Tensor) -> None:
    if header.shape != piece.shape:
        raise OperandError(
            f"{piece.name!r} is {list(header.shape)} in the checkpoint, {list(piece.shape)} here."
        )
    is_float = header.dtype in _FLOATS
    if header.dtype.startswith("F8") or is_float != value.is_floating_point():
        raise OperandError(
            f"{piece.name!r} is {header.dtype} in the checkpoint, {value.dtype} here."
        )


def _common_recipe(weights: Iterable[StoredWeight]) -> Recipe | None:
    """Return the recipe that multiplies the codes of all ``weights``."""
    recipes = list(dict.fromkeys(weight.recipe() for weight in weights))
    blocks = [recipe for recipe in recipes if isinstance(recipe, Float8BlockScaling)]
    if len(recipes) == 2 and len(blocks) == 2:
        # Scales that happen to be powers of two are float32 scales as well.
        dims = {recipe.w_block_scaling_dim for recipe in blocks}
        return (
            next(recipe for recipe in blocks if recipe.use_f32_scales) if len(dims) == 1 else None
        )
    return recipes[0] if len(recipes) == 1 else None


def _fill(target: _Target, value: torch.Tensor, device: torch.device | str | None) -> None:
    """Write ``value`` into the target; one on meta is replaced, on ``device``."""
    current = target.value
    if current.is_meta:
        _replace(target, value.to(target.device(device), current.dtype))
        return
    with torch.no_grad():
        current.copy_(_share(value, current) if is_sharded(current) else value)


def _share(value: torch.Tensor, like: Any) -> torch.Tensor:
    """Return ``value``, which every rank has, spread as the DTensor ``like``: no collective."""
    from torch.distributed.tensor import distribute_tensor

    local = value.to(like.device_mesh.device_type)
    return distribute_tensor(local, like.device_mesh, like.placements, src_data_rank=None)


def _replace(target: _Target, value: torch.Tensor) -> None:
    """Put ``value``, on the target's device, in its place wherever it is held."""
    old = target.value
    if isinstance(old, torch.nn.Parameter):
        value = with_attributes_of(old, torch.nn.Parameter(value, old.requires_grad))
    for module, name in target.holders:
        registry = module._parameters if name in module._parameters else module._buffers
        registry[name] = value  # type: ignore[assignment]  # a Parameter where it was one
