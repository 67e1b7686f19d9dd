"""Modules in a list, which is indexed, sliced and changed as ``torch.nn.Sequential`` is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

from fp8core.errors import OperandError
from fp8core.modules.base import LowPrecisionModule

_Self = TypeVar("_Self", bound="OperationList")


class OperationList(LowPrecisionModule):
    """Holds modules in order; a change of the modules forgets the delayed state of the former
    ones."""

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

    def add_module(self, name: str, module: torch.nn.Module | None) -> None:
        """Add ``module`` at the end, as ``name``."""
        if not isinstance(module, torch.nn.Module):
            raise OperandError(
                f"ops.Sequential: operation {len(self._modules)} is {type(module).__name__}; "
                f"expected a torch.nn.Module, as the operations of fp8core.ops are."
            )
        super().add_module(name, module)
        self._changed()

    def append(self: _Self, module: torch.nn.Module) -> _Self:
        """Add ``module`` at the end; return the container."""
        numbers = [int(key) for key in self._modules if key.isdecimal()]
        self.add_module(str(max(numbers, default=-1) + 1), module)
        return self

    def extend(self: _Self, modules: Iterable[torch.nn.Module]) -> _Self:
        """Add ``modules`` at the end; return the container."""
        for module in list(modules):
            self.append(module)
        return self

    def insert(self: _Self, index: int, module: torch.nn.Module) -> _Self:
        """Add ``module`` before the one at ``index``; return the container."""
        modules = list(self)
        modules.insert(index, module)
        self.append(module)  # which looks at it
        self._modules.update(zip(self._modules, modules, strict=True))
        self._changed()
        return self

    def pop(self, index: int | slice) -> torch.nn.Module:
        """Remove and return the module at ``index``, or a Sequential of those of a slice."""
        removed: torch.nn.Module = self[index]
        del self[index]
        return removed

    def __getitem__(self, index: int | slice) -> Any:
        keys = self._keys_at(index)
        if isinstance(index, slice):
            return self._empty().extend(self._at(key) for key in keys)
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

    def __add__(self, modules: Iterable[torch.nn.Module]) -> OperationList:
        return self._empty().extend(self).extend(modules)

    def __iadd__(self: _Self, modules: Iterable[torch.nn.Module]) -> _Self:
        return self.extend(modules)

    def _empty(self) -> OperationList:
        """Return a list without modules, for a slice or a sum."""
        raise NotImplementedError

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
        """Forget the state of another chain."""
        if self._buffers:
            self.forget_delayed_state()
        else:
            self.unbind()
