"""``load_pretrained``: a checkpoint of any layout into a model, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fp8core.checkpoints.files import Checkpoint, Header
from fp8core.checkpoints.stored import Method, Stored, StoredWeight, method_of, stored_names
from fp8core.checkpoints.writing import unwrapped
from fp8core.errors import Fp8CoreError, OperandError, UnsupportedError, did_you_mean
from fp8core.modules.delayed import DelayedModule
from fp8core.recipe import Float8BlockScaling, Recipe
from fp8core.reporting import log_once, logger, some
from fp8core.tensors.slots import BUFFERS

__all__ = ["Loaded", "load_pretrained"]

# Tensors of quantized layers that a checkpoint may hold and a forward here does not read: scales of
# activations, which are quantized by their own amax.
_UNREAD = ("input_scale", "activation_scale", "input_global_scale", "k_scale", "v_scale", "q_scale")
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What :func:`load_pretrained` did.

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


def load_pretrained(
    directory: str | os.PathLike[str], model: torch.nn.Module, native: bool = False
) -> Loaded:
    """Load the checkpoint in ``directory``, of safetensors files, into ``model``.

    Weights that are stored as codes are dequantized to the parameter's dtype, rounded once from
    float32. With ``native`` the parameter becomes a :class:`fp8core.QuantizedTensor` of the file's
    codes; a layer of fp8core, or of a model that :func:`fp8core.convert` has converted, multiplies
    these in its forward under the ``recipe`` of the result. Everything is checked before the model
    is changed, except the values themselves, which are read tensor by tensor.

    Read are the methods ``fp8`` and ``compressed-tensors`` (``float-quantized``,
    ``mxfp8-quantized``, ``nvfp4-pack-quantized``), scales of any number of dimensions in float32,
    bfloat16, float16, uint8 and e8m0, and files that nothing is quantized in. Weights of three
    dimensions, as of experts, are loaded into parameters of three dimensions.

    Args:
        directory: with an index, or with one file.
        model: has the file's names in its ``state_dict``; parameters on meta get memory on the CPU.
        native: keep the codes.

    Raises:
        OperandError: files, or tensors that the model or the file needs, are missing or too many;
            files are damaged; shapes, scales or blocks do not fit the model or the config.
        UnsupportedError: a quantization method that is not read; with ``native``, codes that no
            recipe multiplies; a parameter is sharded.
    """
    if not isinstance(model, torch.nn.Module):
        raise OperandError(f"load_pretrained(model={model!r}): expected a torch.nn.Module.")
    model = unwrapped(model)
    checkpoint = Checkpoint(directory)
    where = f"load_pretrained({str(directory)!r})"
    try:
        plan = _Plan(checkpoint, _targets(model), native=native)
    except Fp8CoreError as error:
        raise type(error)(f"{where}: {error} Nothing was loaded.") from None
    plan.apply()
    for module in model.modules():
        if isinstance(module, DelayedModule):
            module.reset_delayed_state()
    return plan.loaded()


def _targets(model: torch.nn.Module) -> dict[str, _Target]:
    """Return what the model's state_dict holds, but for the state of delayed scaling."""
    targets: dict[str, _Target] = {}
    holders: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    names = set(model.state_dict(keep_vars=True))
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in {**module._parameters, **module._buffers}.items():
            full = f"{path}.{name}" if path else name
            is_delayed = isinstance(module, DelayedModule) and name in BUFFERS
            if value is None or is_delayed or full not in names:
                continue
            if hasattr(value, "device_mesh"):
                raise UnsupportedError(f"{full!r} is sharded over processes; load before sharding.")
            shared = holders.setdefault(id(value), [])
            if (module, name) not in shared:
                shared.append((module, name))
            targets[full] = _Target(value, shared)
    return targets


class _Plan:
    """What is loaded into what, checked; reads headers and scales."""

    def __init__(
        self, checkpoint: Checkpoint, targets: dict[str, _Target], *, native: bool
    ) -> None:
        self._checkpoint = checkpoint
        headers = checkpoint.headers
        found = {name: stored_names(name, headers) for name in targets}
        present = {name for name in targets if found[name] is not None or name in headers}
        self._targets = _once(targets, present)
        used = {one for stored in found.values() for one in stored or ()} | present
        others = [name for name in headers if name not in used]
        self._unread = tuple(name for name in others if name.endswith(_UNREAD))
        _check_names(
            _missing(targets, present), [n for n in others if n not in self._unread], targets
        )
        self._stored = {name: one for name in self._targets if (one := found[name]) is not None}
        self._weights = self._read_scales()
        for name, target in self._targets.items():
            if name not in self._stored:
                _check_plain(name, headers[name], target.value)
        self._recipe = _common_recipe(self._weights.values())
        self._native = self._keeping() if native else set()

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
            name: self._weight(name, stored, scales, method)
            for name, stored in self._stored.items()
        }

    def _weight(
        self, name: str, stored: Stored, scales: dict[str, torch.Tensor], method: Method
    ) -> StoredWeight:
        return StoredWeight(
            name,
            self._targets[name].value.shape,
            self._checkpoint.headers[stored.codes],
            scales[stored.scale],
            None if stored.outer is None else scales[stored.outer],
            method,
        )

    def _keeping(self) -> set[str]:
        """Return the names of the parameters that keep the file's codes."""
        faults = {
            name: fault
            for name, weight in self._weights.items()
            if (fault := weight.native_fault(self._targets[name].value.dtype)) is not None
        }
        flat = [name for name in faults if len(self._weights[name].shape) == 2]
        if flat:
            raise UnsupportedError(
                f"native=True cannot keep the codes of {some(flat)}: {faults[flat[0]]}. "
                f"native=False dequantizes them."
            )
        if self._weights and self._recipe is None:
            raise UnsupportedError(
                "native=True: the file's weights are quantized in several ways, which no one "
                "recipe multiplies. native=False dequantizes them."
            )
        if faults:
            logger.warning(
                "load_pretrained: %s are dequantized: %s",
                some(list(faults)),
                next(iter(faults.values())),
            )
        return set(self._weights) - set(faults)

    def loaded(self) -> Loaded:
        """Return what is loaded, and log what is not read."""
        if self._unread:
            log_once(
                f"load_pretrained: {some(self._unread)} are not read: activations are quantized by "
                f"their own amax"
            )
        native = [name for name in self._weights if name in self._native]
        others = [name for name in self._weights if name not in self._native]
        return Loaded(tuple(native), tuple(others), self._recipe, self._unread)

    def apply(self) -> None:
        """Read the values tensor by tensor into the model."""
        by_file = {stored.codes: name for name, stored in self._stored.items()}
        plain = {name: name for name in self._targets if name not in self._stored}
        for key, value in self._checkpoint.read({**by_file, **plain}):
            name = by_file.get(key, key)
            target, weight = self._targets[name], self._weights.get(name)
            if weight is None:
                _fill(target, value)
            elif name in self._native:
                assert self._recipe is not None
                _replace(target, weight.quantized(value, self._recipe, target.value.dtype))
            else:
                _fill(target, weight.values(value, target.value.dtype))


def _once(targets: dict[str, _Target], present: set[str]) -> dict[str, _Target]:
    """Return the targets that the file has, each tensor under its first name alone."""
    chosen: dict[int, str] = {}
    for name, target in targets.items():
        if name in present:
            chosen.setdefault(id(target.value), name)
    return {name: targets[name] for name in chosen.values()}


def _missing(targets: dict[str, _Target], present: set[str]) -> list[str]:
    """Return the names of tensors that the file has under none of their names."""
    loaded = {id(targets[name].value) for name in present}
    return [name for name, target in targets.items() if id(target.value) not in loaded]


def _check_names(missing: list[str], others: list[str], targets: dict[str, _Target]) -> None:
    problems = []
    if missing:
        problems.append(f"the checkpoint lacks {some(missing)}, which the model has")
    if others:
        near = did_you_mean(others[0], [*targets]) if not missing else ""
        problems.append(f"it holds {some(others)}, which the model has not{near.rstrip('?')}")
    if problems:
        raise OperandError(f"{'; '.join(problems)}.")


def _check_plain(name: str, header: Header, value: torch.Tensor) -> None:
    if header.shape != tuple(value.shape):
        raise OperandError(
            f"{name!r} is {list(header.shape)} in the checkpoint, {list(value.shape)} here."
        )
    is_float = header.dtype in _FLOATS
    if header.dtype.startswith("F8") or is_float != value.is_floating_point():
        raise OperandError(f"{name!r} is {header.dtype} in the checkpoint, {value.dtype} here.")


def _common_recipe(weights: Iterable[StoredWeight]) -> Recipe | None:
    """Return the recipe that multiplies the codes of all ``weights``."""
    recipes = list(dict.fromkeys(weight.recipe() for weight in weights))
    blocks = [one for one in recipes if isinstance(one, Float8BlockScaling)]
    if len(recipes) == 2 and len(blocks) == 2:
        # Scales that happen to be powers of two are float32 scales as well.
        dims = {one.w_block_scaling_dim for one in blocks}
        return next(one for one in blocks if one.use_f32_scales) if len(dims) == 1 else None
    return recipes[0] if len(recipes) == 1 else None


def _fill(target: _Target, value: torch.Tensor) -> None:
    """Write ``value`` into the target; one on meta is replaced."""
    if target.value.is_meta:
        _replace(target, value.to(target.value.dtype))
        return
    with torch.no_grad():
        target.value.copy_(value)


def _replace(target: _Target, value: torch.Tensor) -> None:
    """Put ``value`` in the target's place, wherever it is held."""
    old = target.value
    new = value if old.is_meta else value.to(old.device)
    if isinstance(old, torch.nn.Parameter):
        new = torch.nn.Parameter(new, old.requires_grad)
        attributes = vars(new)
        attributes.update({n: one for n, one in vars(old).items() if n not in attributes})
    for module, name in target.holders:
        held = module._parameters if name in module._parameters else module._buffers
        held[name] = new  # type: ignore[assignment]  # a Parameter where it was one
