"""Backends that are right in one call, and wrong in a later one or beside another."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fp8core.backend_api import (
    GemmDesc,
    OpDesc,
    QuantizeDesc,
)
from fp8core_backends.reference.quantize import quantize
from tests.conformance.broken import Run, Sound, caught_by


def tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def floats(tree: Any, change: Any) -> Any:
    return pytree.tree_map_only(
        torch.Tensor, lambda x: change(x) if x.is_floating_point() else x, tree
    )


class Wrapped(Sound):
    """Runs every operation through ``call``."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}

    def bind(self, desc: OpDesc, device: torch.device) -> Run:
        run = super().bind(desc, device)
        return lambda *given, **named: self.call(desc, run, given, named)

    def call(self, desc: OpDesc, run: Run, given: Any, named: Any) -> Any:
        raise NotImplementedError


@caught_by("law7_no_result_is_kept_from_another_call")
class KeepsResults(Wrapped):
    """Takes a call of the same descriptor and the same shapes for the one before."""

    def call(self, desc: OpDesc, run: Run, given: Any, named: Any) -> Any:
        key = desc, *(x.shape for x in tensors((given, named)))
        if desc.op == "scale_update" or "out" in named or key not in self.kept:
            self.kept[key] = run(*given, **named)
        return self.kept[key]


@caught_by("law7_no_result_is_kept_from_another_call")
class KeepsResultsByVersion(Wrapped):
    """Takes tensors of the same address and version for the ones before."""

    def call(self, desc: OpDesc, run: Run, given: Any, named: Any) -> Any:
        own = tensors((given, named))
        key = desc, *((x.data_ptr(), x._version, x.shape) for x in own)
        if desc.op == "scale_update" or "out" in named or key not in self.kept:
            self.kept[key] = run(*given, **named), own  # own: so that no address is used again
        return self.kept[key][0]


@caught_by("law7_no_result_is_kept_from_another_call")
class KeepsScales(Sound):
    """Quantizes with the scales of the first tensor of a shape."""

    def __init__(self) -> None:
        self.kept: dict[Any, Any] = {}

    def quantize(self, desc: QuantizeDesc, x: torch.Tensor, *groups: Any, **given: Any) -> Any:
        made = quantize(desc, x, *groups, **given)
        kept = self.kept.setdefault((desc, x.shape), made)
        both = zip(made, kept, strict=True)
        return type(made)(
            *(None if one is None else one._replace(scale_inv=old.scale_inv) for one, old in both)
        )


@caught_by("law7_results_stay_when_it_runs_again")
class ReusesItsBuffer(Wrapped):
    """Returns the same memory from every call."""

    def call(self, desc: OpDesc, run: Run, given: Any, named: Any) -> Any:
        made = run(*given, **named)
        if "out" in named:
            return made
        key = desc, *(x.shape for x in tensors(made))
        buffers = self.kept.setdefault(key, made)
        for buffer, value in zip(tensors(buffers), tensors(made), strict=True):
            buffer.copy_(value)
        return buffers


@caught_by("law7_every_thread_gets_the_same_results")
class FailsInASecondThread(Wrapped):
    def call(self, desc: OpDesc, run: Run, given: Any, named: Any) -> Any:
        made = run(*given, **named)
        if threading.current_thread() is threading.main_thread():
            return made
        return floats(made, torch.zeros_like)


@caught_by("law7_every_thread_gets_the_same_results")
class SharesItsWorkspace(Wrapped):
    """Leaves its arguments where another thread's call finds them."""

    given: Any = None

    def call(self, desc: OpDesc, run: Run, given: Any, named: Any) -> Any:
        self.given = given
        time.sleep(0.001)
        return run(*self.given, **named)


@caught_by("law7_no_global_generator_is_used")
class DrawsFromTheGenerator(Wrapped):
    def call(self, desc: OpDesc, run: Run, given: Any, named: Any) -> Any:
        torch.rand(1)
        return run(*given, **named)


@caught_by("law7_no_global_generator_is_used")
class DrawsFromPython(Wrapped):
    def call(self, desc: OpDesc, run: Run, given: Any, named: Any) -> Any:
        random.random()
        return run(*given, **named)


@caught_by("law7_no_global_generator_is_used")
class FollowsTheGenerator(Wrapped):
    """Disturbs results by torch's generator, whose state it gives back."""

    def call(self, desc: OpDesc, run: Run, given: Any, named: Any) -> Any:
        with torch.random.fork_rng([]):
            noise = 1 + 2.0**-12 * torch.rand(())
        return floats(run(*given, **named), lambda x: (x * noise).to(x.dtype))


@caught_by("law7_every_run_gives_the_same_bits")
class DiffersFromRunToRun(Wrapped):
    """Every other result is rounded another way, well within its bound."""

    count = 0

    def call(self, desc: OpDesc, run: Run, given: Any, named: Any) -> Any:
        made = run(*given, **named)
        self.count += 1
        if not isinstance(desc, GemmDesc) or self.count % 2:
            return made
        return floats(made, lambda x: torch.nextafter(x, torch.zeros_like(x)))
