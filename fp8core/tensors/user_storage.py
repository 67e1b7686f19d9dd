"""Storages of a user's own: what the quantizers of a custom recipe make instead of codes of ours.

As in Transformer Engine, such a quantizer returns an object of a class derived from
:class:`QuantizedTensorStorage`, and two such objects are multiplied by the quantizer's ``qgemm``.
No backend reads them. They travel through a chain as every operand does: as its ``data``, a
:class:`StorageTensor`, which the chain saves, hands over and frees without looking inside.
"""

from __future__ import annotations

import copy
import itertools
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar, TypeGuard

import torch

from fp8core.backend_api import Operand
from fp8core.errors import OperandError
from fp8core.recipe.plan import TensorPlan
from fp8core.tensors.quantizer import Orientations
from fp8core.torch_ops.private import make_wrapper, no_torch_function, pytree

_KEEPS_CONTENT = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)


class QuantizedTensorStorage:
    """Base of what quantizers make: of :class:`fp8core.QuantizedTensor`, and of a user's storages.

    A quantizer of the user's may return a storage of its own class, a plain object: for
    ``CustomRecipe(qfactory=...)``, whose layers multiply two storages by ``qgemm`` of the quantizer
    of the first, as Transformer Engine does::

        qgemm(data, data, MMParams, out_dtype, scale, scale, bias, gemm_type=GEMMType.FPROP,
              qresult_x=storage, qresult_w=storage)

    of ``data`` and ``scale`` of rowwise operands, of ``data_t`` and ``scale_t`` of columnwise ones.
    Where a product has one storage alone, or no ``qgemm``, ``dequantize(dtype=)`` of the storage is
    multiplied in high precision.
    """

    plan: Any = TensorPlan(None, None)  # no backend reads a user's storage
    _quantizer: Any = None

    def update_usage(
        self, rowwise_usage: bool | None = None, columnwise_usage: bool | None = None
    ) -> None:
        """Drop an orientation, or make it from the other one; the user's class says how.

        Raises:
            NotImplementedError: it does not.
        """
        raise self._lacks("update_usage")

    def get_usages(self) -> dict[str, bool]:
        """Return which orientations are held; the user's class says it, else NotImplementedError is
        raised."""
        raise self._lacks("get_usages")

    def prepare_for_saving(self) -> tuple[list[torch.Tensor | None], QuantizedTensorStorage]:
        """Return the tensors that autograd is to save, and the storage without them; the user's
        class does it, else NotImplementedError is raised."""
        raise self._lacks("prepare_for_saving")

    def restore_from_saved(
        self, tensors: Sequence[torch.Tensor | None]
    ) -> Sequence[torch.Tensor | None]:
        """Take the first of ``tensors`` back, and return the others; the user's class does it, else
        NotImplementedError is raised."""
        raise self._lacks("restore_from_saved")

    def _get_quantizer(self) -> Any:
        """Return the quantizer that writes this storage.

        Raises:
            OperandError: it has none.
        """
        return self._build_default_quantizer() if self._quantizer is None else self._quantizer

    def _build_default_quantizer(self) -> Any:
        raise OperandError(
            f"{type(self).__name__} has no quantizer. Set its attribute _quantizer, or override "
            f"_build_default_quantizer()."
        )

    def quantize_(self, tensor: torch.Tensor, *, noop_flag: torch.Tensor | None = None) -> Any:
        """Quantize ``tensor`` into this storage by its quantizer's ``update_quantized``, and return
        it."""
        self._get_quantizer().update_quantized(tensor, self, noop_flag=noop_flag)
        return self

    def _lacks(self, method: str) -> NotImplementedError:
        return NotImplementedError(f"{type(self).__name__} does not implement {method}().")


_READ_BY_QGEMM = ("data", "scale", "data_t", "scale_t")


class Codes:
    """The tensors of a storage as a cast left them, by their versions, which each write raises.

    Source: torch's counter of writes in place, by which autograd refuses what it has saved.
    """

    def __init__(self, storage: QuantizedTensorStorage) -> None:
        attributes = _attributes_of(storage)
        # Others may be the quantizer's, as a history of amaxes; without these all are read.
        read = {name: attributes[name] for name in _READ_BY_QGEMM if name in attributes}
        leaves = pytree.tree_leaves(read or attributes)
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._written = [(weakref.ref(t), _state_of(t)) for t in tensors if not t.is_inference()]
        self._is_replaced = False

    @property
    def are_written(self) -> bool:
        """Whether one of them was written since, or a later cast put others into the storage."""
        tensors = [(ref(), state) for ref, state in self._written]
        is_written = any(t is not None and _state_of(t) != state for t, state in tensors)
        return self._is_replaced or is_written

    def follow(self, earlier: Codes) -> None:
        """Have ``earlier``, of a cast that returned the same storage, know whether these are
        others."""
        pairs = zip(self._written, earlier._written, strict=False)
        is_same = all(t() is old() and now == before for (t, now), (old, before) in pairs)
        earlier._is_replaced |= not is_same or len(self._written) != len(earlier._written)


def _attributes_of(storage: QuantizedTensorStorage) -> dict[str, Any]:
    """Return the attributes of ``storage``, those in slots of its class too."""
    declared = [vars(cls).get("__slots__", ()) for cls in type(storage).__mro__]
    slots = [(names,) if isinstance(names, str) else names for names in declared]
    present = (name for name in itertools.chain(*slots) if hasattr(storage, name))
    return {**vars(storage), **{name: getattr(storage, name) for name in present}}


def _state_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the version of ``tensor`` and, as ``tensor.data = other`` raises none, its address."""
    is_plain = type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return tensor._version, tensor.data_ptr() if is_plain else 0


_latest: weakref.WeakValueDictionary[int, Codes] = weakref.WeakValueDictionary()
"""What the latest cast that returned a storage left in it, by the id of one that an operand has."""


class StorageTensor(torch.Tensor):
    """The ``data`` of an operand in a user's storage: sizes, dtype and device, and no memory.

    ``content`` is the storage, whose tensors are to stay as ``codes`` has them. The products that
    read it take it out; every operator of torch but ``detach`` is refused.
    """

    content: QuantizedTensorStorage
    codes: Codes

    __torch_function__: ClassVar[Any] = no_torch_function

    @staticmethod
    def __new__(
        cls: type[StorageTensor],
        content: QuantizedTensorStorage,
        size: Sequence[int],
        likeness: torch.Tensor,
        codes: Codes,
    ) -> StorageTensor:
        """Wrap ``content``, of ``size``, and of dtype and device of ``likeness``."""
        self: StorageTensor = make_wrapper(
            cls, tuple(size), dtype=likeness.dtype, device=likeness.device
        )
        self.content, self.codes = content, codes
        return self

    def tensors(self) -> list[torch.Tensor]:
        """Return no tensor: those of a user's storage are its own."""
        return []

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is untyped
        return f"StorageTensor({list(self.shape)}, {type(self.content).__name__})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares less
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _KEEPS_CONTENT:
            return cls(args[0].content, args[0].shape, args[0], args[0].codes)
        names = {type(each.content).__name__ for each in args if isinstance(each, cls)}
        raise OperandError(
            f"{func.overloadpacket} reads {', '.join(names) or 'a storage'}, which a user's "
            f"quantizer made. Its qgemm() and dequantize() alone read it: hooks that move what is "
            f"saved for backward cannot, such as torch.autograd.graph.save_on_cpu. Leave them out, "
            f"or quantize by fp8core's quantizers."
        )


def is_users(result: object) -> TypeGuard[QuantizedTensorStorage]:
    """Say whether ``result`` is a storage of a user's own class."""
    return isinstance(result, QuantizedTensorStorage) and not isinstance(result, torch.Tensor)


def operands_of(
    storage: QuantizedTensorStorage,
    x: torch.Tensor,
    *,
    rowwise: bool,
    columnwise: bool,
    is_split: bool,
) -> Orientations:
    """Return the operands of ``x [rows, cols]`` that ``storage`` holds.

    If it ``is_split``, and can drop an orientation, the two operands hold one each, so that the
    first is freed when it was read.
    """
    rows = columns = storage
    drops = type(storage).update_usage is not QuantizedTensorStorage.update_usage
    if is_split and rowwise and columnwise and drops:
        rows = copy.copy(storage)
        rows.update_usage(rowwise_usage=True, columnwise_usage=False)
        columns.update_usage(rowwise_usage=False, columnwise_usage=True)
    left = {id(each): _left_in(each) for each in (rows, columns)}
    return Orientations(
        Operand(StorageTensor(rows, x.shape, x, left[id(rows)])) if rowwise else None,
        Operand(StorageTensor(columns, x.shape[::-1], x, left[id(columns)]))
        if columnwise
        else None,
    )


def _left_in(storage: QuantizedTensorStorage) -> Codes:
    """Return what a cast left in ``storage``; of an earlier cast that returned the same object, to
    which operands still belong, other tensors are no longer the codes."""
    codes, earlier = Codes(storage), _latest.get(id(storage))
    if earlier is not None:
        codes.follow(earlier)
    _latest[id(storage)] = codes
    return codes
