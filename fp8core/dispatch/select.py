"""Which backend runs a descriptor on a device, and why none of the others does."""

from __future__ import annotations

import itertools
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from fp8core.backend_api import BackendSpec, OpDesc
from fp8core.dispatch import plugins, settings
from fp8core.dispatch.isolation import Failure, attempt, is_a, shown
from fp8core.dispatch.policy import Policy
from fp8core.dispatch.registry import Registry, devices_of_kinds
from fp8core.errors import PluginError, UnsupportedError

_BY_PRIORITY = "device and priority"
_EMULATES = "nothing native; emulates it"


class Verdict(NamedTuple):
    """A backend's answer to a descriptor: why it cannot run it (None: it can).

    ``emulated``: it runs the descriptor by computing in high precision, on a device of a type that
    the backend does not list.
    """

    backend: str
    reason: str | None
    emulated: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend for a descriptor on a device, why it was chosen, and every backend's verdict."""

    desc: OpDesc
    device: torch.device
    backend: str
    because: str
    substitution: str | None
    verdicts: tuple[Verdict, ...]

    @property
    def is_emulated(self) -> bool:
        """Whether the backend computes ``desc`` in high precision, on a device that is not its."""
        return any(v.emulated for v in self.verdicts if v.backend == self.backend)

    def __str__(self) -> str:
        lines = [f"{self.desc} on {self.device}: {self.backend} ({self.because})"]
        if self.substitution:
            lines.append(f"  substitution: {self.substitution}")
        others = (verdict for verdict in self.verdicts if verdict.backend != self.backend)
        lines += [f"  {verdict.backend}: {self._why_not(verdict)}" for verdict in others]
        return "\n".join(lines)

    def _why_not(self, verdict: Verdict) -> str:
        """Say why a backend was not taken: it cannot, or another came first."""
        if verdict.reason is not None:
            return verdict.reason
        how = "could emulate it" if verdict.emulated else "could run it"
        return f"{how}, but {self.backend} comes first ({self.because})"


def choose(
    desc: OpDesc, device: torch.device, policy: Policy, explicit: str | None = None
) -> Choice:
    """Choose in this order: ``explicit``, use_backend, FP8CORE_OP_BACKEND, FP8CORE_BACKEND, the
    site policy's hook, the device's backends by priority, the reference on the same device; never
    one that ``policy`` leaves out.

    The choice depends on declarations alone, so the same question has the same answer.

    Raises:
        UnsupportedError: no backend can run it; or only a substitute can, and it is a low-precision
            product or the mode is strict; or the backend that was asked for is left out.
        RecipeError, PluginError: the backend that was asked for is unknown or broken.
    """
    environment = settings.read()
    registry = plugins.load()
    answers = [verdict(registry, spec, desc, device) for spec in registry.by_priority()]
    verdicts = tuple(_unless_left_out(answer, policy, desc.op) for answer in answers)
    by_name = {verdict.backend: verdict for verdict in verdicts}
    named, origin = _named(desc.op, policy, environment, explicit)
    substitution: str | None = None
    if named is not None:
        registry.spec(named, origin)
        because_of = policy.why_left_out(named, desc.op)
        if because_of is not None:
            raise UnsupportedError(
                f"{origin} asks for {named}, which is left out of {desc.op}: {because_of} [{desc} "
                f"on {device}]"
            )
        if by_name[named].reason is None:
            return Choice(desc, device, named, origin, None, verdicts)
        substitution = f"{origin} asks for {named}, but {by_name[named].reason}"
    native = [v.backend for v in verdicts if v.reason is None and not v.emulated]
    emulating = [v.backend for v in verdicts if v.reason is None and v.emulated]
    is_low_precision_product = is_product(desc)
    if native and not (substitution and is_low_precision_product):
        picked = site_pick(registry, desc, device, tuple(native))
        backend, because = native[0] if picked is None else picked, "site policy"
        if picked is None:
            pairs = zip(answers, verdicts, strict=True)
            before = itertools.takewhile(lambda pair: pair[1].backend != backend, pairs)
            left_out = [f"{now.backend} is {now.reason}" for first, now in before if now != first]
            because = "; ".join(left_out) or _BY_PRIORITY
    elif emulating and not is_low_precision_product:
        backend, because = emulating[0], _EMULATES
        substitution = substitution or f"no native backend for {device}"
    else:
        failed = [(row.name, row.reason) for row in registry.rows if row.reason is not None]
        refusal = _refusal(desc, device, verdicts, substitution, failed)
        first, *lines = refusal.splitlines()
        raise UnsupportedError("\n".join([_left_out(first, registry) or first, *lines]))
    if substitution and environment.strict:
        raise UnsupportedError(
            f"FP8CORE_STRICT=1: {desc} on {device} would run on {backend}: {substitution}."
        )
    return Choice(desc, device, backend, because, substitution, verdicts)


def _unless_left_out(answer: Verdict, policy: Policy, op: str) -> Verdict:
    """Return ``answer``, or if the backend could run ``op`` and ``policy`` leaves it out, why."""
    because = policy.why_left_out(answer.backend, op)
    if because is None or answer.reason is not None:
        return answer
    return Verdict(answer.backend, f"left out: {because}")


def is_product(desc: OpDesc) -> bool:
    """Say whether ``desc`` multiplies quantized tensors: a GEMM, or attention."""
    return desc.low_precision and ("gemm" in desc.op or "attention" in desc.op)


def declined(choice: Choice) -> list[Verdict]:
    """Return the verdicts of the backends for the device that have a higher priority than the
    chosen one.

    Empty where the program, the environment or a site policy decided.
    """
    if choice.because != _BY_PRIORITY:
        return []
    backends = plugins.load().backends
    before = itertools.takewhile(lambda v: v.backend != choice.backend, choice.verdicts)
    return [v for v in before if choice.device.type in backends[v.backend].device_types]


def is_fallback(choice: Choice) -> bool:
    """Say whether a backend for other devices runs ``choice``, and nobody asked for it by name."""
    if choice.because not in (_BY_PRIORITY, _EMULATES):
        return False
    return choice.device.type not in plugins.load().backends[choice.backend].device_types


def selected_spec(policy: Policy) -> BackendSpec:
    """Return the backend for new modules: the one asked for, or the usable one that comes first."""
    registry = plugins.load()
    named = named_spec(policy)
    if named is not None:
        return named
    for spec in registry.by_priority():
        if registry.unusable(spec) is None:
            return spec
    raise UnsupportedError(
        _left_out("no backend can be used here", registry)
        or "no backend can be used here; `fp8core doctor` says why. "
        "Install fp8core with pip, so that its entry points are registered."
    )


def _left_out(failure: str, registry: Registry) -> str:
    """Return ``failure`` with its cause if the environment leaves plug-ins out and no backend for
    all devices is there; else an empty text."""
    names = [row.name for row in registry.rows if row.reason == plugins.DISABLED]
    if not names or any(spec.portable for spec in registry.backends.values()):
        return ""
    return f"{failure}: FP8CORE_DISABLE_PLUGINS leaves out {', '.join(names)}; unset it"


def named_spec(policy: Policy) -> BackendSpec | None:
    """Return the backend that program or environment ask for by name, None if neither does.

    Raises:
        RecipeError, PluginError: there is none of that name, or its plug-in is broken.
    """
    named, origin = _named(None, policy, settings.read(), None)
    return None if named is None else plugins.load().spec(named, origin)


def default_device(policy: Policy) -> torch.device:
    """Return the device for the parameters of new modules: the selected backend's preferred one.

    Raises:
        UnsupportedError: the selected backend cannot be used on this machine.
    """
    spec = selected_spec(policy)
    reason = plugins.load().unusable(spec)
    if reason is not None:
        raise UnsupportedError(f"backend {spec.name!r} is selected, but: {reason}")
    return devices_of_kinds(spec.device_types)[0]


def why_no_device(device: object, error: str) -> str:
    """Return the message that torch cannot create tensors on ``device``: the reasons of the
    backends for its type, or the ``error`` of torch where there is no such backend."""
    registry, kind = plugins.load(), str(device).partition(":")[0]
    reasons = {spec: registry.unusable(spec) for spec in registry.by_priority()}
    usable = [name for spec, reason in reasons.items() if not reason for name in spec.device_types]
    mine = [f"{s.name}: {why}" for s, why in reasons.items() if why and kind in s.device_types]
    lines = mine or [f"torch: {error.partition('. ')[0][:200]}"]
    return "\n  ".join(
        [
            f"device={str(device)!r} cannot be used here; devices of usable backends: "
            f"{', '.join(dict.fromkeys(usable)) or 'none'}",
            *lines,
        ]
    )


def verdict(registry: Registry, spec: BackendSpec, desc: OpDesc, device: torch.device) -> Verdict:
    """Ask the backend of ``spec`` whether it runs ``desc`` on ``device``, and how."""
    native = device.type in spec.device_types
    if not native and not spec.portable:
        return Verdict(spec.name, f"runs on {'/'.join(spec.device_types)}, not on {device.type}")
    reason = registry.unsupported(spec, desc, device)
    return Verdict(spec.name, reason, emulated=not native and desc.low_precision)


def _named(
    op: str | None, policy: Policy, environment: settings.Settings, explicit: str | None
) -> tuple[str | None, str]:
    names = (
        (explicit, "the argument backend="),
        (dict(policy.op_backends).get(op or ""), "use_backend()"),
        (policy.backend, "use_backend()"),
        (dict(environment.op_backends).get(op or ""), "FP8CORE_OP_BACKEND"),
        (environment.backend, "FP8CORE_BACKEND"),
    )
    return next(((name, by) for name, by in names if name is not None), (None, ""))


def site_pick(
    registry: Registry,
    desc: OpDesc,
    device: torch.device,
    candidates: Sequence[str],
    only: object | None = None,
) -> str | None:
    """Return which of ``candidates`` the plug-ins' ``fp8core_select_backend`` hook picks, if any.

    With ``only``, a plug-in, no other is asked.

    Raises:
        PluginError: a plug-in's hook failed; a policy that cannot answer is not skipped.
        UnsupportedError: it picks something that is not among the candidates.
    """
    installed = [plugin for plugin in registry.manager.get_plugins() if only not in (None, plugin)]
    hook = registry.manager.subset_hook_caller("fp8core_select_backend", installed)
    implementations = hook.get_hookimpls()
    picked = attempt(lambda: hook(op=desc.op, desc=desc, device=device, candidates=candidates))
    if isinstance(picked, Failure):
        ran = [frame.f_code for frame, _ in traceback.walk_tb(picked.error.__traceback__)]
        guilty = [
            hook for hook in implementations if getattr(hook.function, "__code__", None) in ran
        ]
        names = ",".join(hook.plugin_name for hook in guilty or implementations)
        raise PluginError(
            f"plug-in {names}: its fp8core_select_backend failed for {desc} on {device}: {picked}. "
            f"FP8CORE_DISABLE_PLUGINS={names} leaves it out, and it is not asked where the "
            f"program or FP8CORE_BACKEND names a backend."
        ) from picked.error
    if picked is None:
        return None
    if is_a(picked, str) and str.__str__(picked) in candidates:
        return str.__str__(picked)
    names = ", ".join(hook.plugin_name for hook in implementations)
    raise UnsupportedError(
        f"the site policy picks {shown(picked)} for {desc} on {device} (plug-in {names}); "
        f"able are {list(candidates)}."
    )


def _refusal(
    desc: OpDesc,
    device: torch.device,
    verdicts: tuple[Verdict, ...],
    substitution: str | None,
    failed: list[tuple[str, str]],
) -> str:
    lines = [f"no backend runs {desc} on {device}" + (f" ({substitution})" if substitution else "")]
    for verdict in verdicts:
        if verdict.reason is not None:
            lines.append(f"  {verdict.backend}: {verdict.reason}")
        elif verdict.emulated:
            lines.append(
                f"  {verdict.backend}: emulates it on any device; choose it with "
                f'FP8CORE_BACKEND={verdict.backend} or use_backend("{verdict.backend}")'
            )
        else:
            lines.append(f"  {verdict.backend}: can run it, but was not asked for")
    lines += [f"  plug-in {name} is not used: {reason}" for name, reason in failed]
    return "\n".join(lines)
