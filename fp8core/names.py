"""Names that lead elsewhere: short names of modules, modules that moved, and names of Transformer
Engine that fp8core does not have, with what to use instead."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from fp8core.errors import nearest

SHORT = {
    "checkpoints": "interchange.checkpoints",
    "cpu_offload": "training.cpu_offload",
    "cross_entropy": "training.cross_entropy",
    "export": "interchange.export",
    "hookspecs": "backend_api.hooks",
    "huggingface": "integrations.huggingface",
    "lightning": "integrations.lightning",
    "megatron": "integrations.megatron",
    "mindspeed": "integrations.mindspeed",
    "monitoring": "inspection.monitoring",
    "optimizers": "training.optimizers",
    "permutation": "training.permutation",
    "plan": "recipe.plan",
    "quantizers": "functional.quantizers",
    "router": "training.router",
    "torchtitan": "integrations.torchtitan",
    "transformer_engine": "integrations.transformer_engine",
}
"""Modules that users import by a short name, ``fp8core.optimizers``, and where each is."""

LATE = {
    "CudaRNGStatesTracker": "integrations.transformer_engine.distributed",
    "onnx_export": "interchange.export",
    "tune": "inspection.tuning",
}
"""Public names of fp8core whose module is loaded when they are first asked for."""

PICKLED = {
    "chain.pointwise": "chain.boundary",
    "chain.regrouped": "chain.simple",
    "chain.scaled_activation": "chain.activation",
    "conversion.report": "conversion.convert",
    "functional.exchange": "functional.quantize",
    "functional.quantizers.composed": "functional.quantizers",
    "functional.quantizers.dtype": "functional.quantizers",
    "functional.quantizers.float8": "functional.quantizers",
    "functional.quantizers.named": "functional.quantizers",
    "functional.quantizers.nvfp4": "functional.quantizers",
    "integrations.megatron.linears": "integrations.megatron",
    "modules.activation": "ops.activation",
    "modules.attention_boundary": "modules.composition",
    "modules.bindings": "modules.memo",
    "modules.extra_state.attention": "modules.state.extra_state",
    "modules.extra_state.state": "modules.state.extra_state",
    "modules.extra_state": "modules.state",
    "modules.first_step": "modules.models.prepare",
    "modules.padding": "modules.layers.grouped_linear",
    "modules.refusals": "modules.calls.parameters",
    "modules.residual": "modules.layers.operation",
    "modules.sequential": "ops.sequential",
    "modules.tensor_operations": "modules.layers.operation",
    "modules.transformer_chain": "modules.composition",
    "parameter": "tensors.parameter",
    "tensors.parameter.init": "tensors.parameter",
    "tensors.parameter.names": "tensors.parameter",
    "training.optimizers.fused_sgd": "training.optimizers.fused",
    "training.optimizers.multi_tensor": "training.optimizers",
    **{
        f"modules.{module}": f"modules.{room}.{module}"
        for room, modules in {
            "calls": "base bind bound inputs parameters",
            "layers": "grouped_linear layernorm_linear layernorm_mlp linear norm operation "
            "parallel",
            "models": "found_inf frozen graphs inventory prepare",
            "sequences": "attention_arguments attention_inputs context_group head_split inference "
            "kv_cache rotary rotary_angles",
            "state": "delayed loading",
        }.items()
        for module in modules.split()
    },
}
"""Modules that models and quantizers pickled by an earlier version name, and where each is."""

MOVED = {
    "commands": "cli.commands",
    "communicator": "collectives",
    "compat": "integrations",
    "conversion.hugging_face": "conversion.huggingface",
    "demo": "cli.demo",
    "extra_state": "modules.state",
    "inspect": "inspection",
    "not_offered": "names",
    "testing": "conformance",
}
"""Modules that an earlier version had under another name, and where each is."""


_NEEDED = {
    "fp8core.integrations.huggingface.quantizer": {
        "transformers": "transformers",
        "safetensors": "safetensors",
    },
    "fp8core.integrations.lightning": {"lightning": "lightning"},
    "fp8core.integrations.megatron": {"megatron": "megatron-core"},
    "fp8core.integrations.torchtitan": {"torchtitan": "torchtitan"},
}
"""The packages that a module imports and fp8core does not bring, each as pip calls it."""

_LOADED = {**SHORT, **PICKLED}


class _Finder(MetaPathFinder, Loader):
    """Loads a module once, whichever of its names is imported."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """Return the spec of a module by its short name; None for other names, and where the module
        has no such part, so that the error of an import names what was imported.

        Raises:
            ModuleNotFoundError: the module moved; says where it is. Without a name, as Python would
                else replace the message of ``from ... import`` by its own. Or a package that the
                module needs is not installed.
        """
        if (message := moved(fullname)) is not None:
            raise ModuleNotFoundError(message)
        for package, name in _NEEDED.get(fullname, {}).items():
            if package not in sys.modules and importlib.util.find_spec(package) is None:
                raise ModuleNotFoundError(
                    f"{fullname} needs {package}, which is not installed: pip install {name}",
                    name=package,
                )
        place = _place(fullname, _LOADED)
        if place is None or importlib.util.find_spec(place) is None:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Return the module that the name stands for."""
        place = _place(spec.name, _LOADED)
        assert place is not None
        module = importlib.import_module(place)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module back its own spec, which Python replaced."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def _place(name: str, places: Mapping[str, str]) -> str | None:
    """The name that a module is found under, if it or a package around it is one of ``places``."""
    root, _, inside = name.partition(".")
    if root != "fp8core":
        return None
    for old, new in places.items():
        if inside == old or inside.startswith(f"{old}."):
            return f"fp8core.{new}{inside[len(old) :]}"
    return None


def moved(name: str) -> str | None:
    """Return the message that the module ``name`` has moved, with its place; None for other names.

    >>> moved("fp8core.testing")
    'fp8core.testing has moved: import fp8core.conformance.'
    """
    place = _place(name, MOVED)
    return None if place is None else f"{name} has moved: import {place}."


def install() -> None:
    """Have Python find modules by the names above."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


_ROUTER = "qb_histogram_mode takes 'two_kernel' or 'fused_atomic'"
_OVERLAP = "collectives run on the process group itself; no buffers are shared in advance"
_PLAIN = "IdentityQuantizer returns a plain tensor"
_LINEAR_ATTENTION = "linear attention is not offered; use a library that has its kernels"
_COMMUNICATION_GROUPS: Mapping[str, tuple[str, ...]] = {
    _OVERLAP: (
        "UserBufferQuantizationMode",
        "destroy_ub",
        "initialize_ub",
    ),
    "set_context_parallel_group balances by two chunks of each sequence a rank": (
        "CPLoadBalancingStrategy",
    ),
    "it needs cuSOLVERMp across ranks; torch.optim.Muon has Newton-Schulz on one": (
        "CusolverMpCtx",
        "newton_schulz",
        "newton_schulz_tp",
    ),
}
_GROUPS: Mapping[str, tuple[str, ...]] = {
    **_COMMUNICATION_GROUPS,
    _PLAIN: (
        "IdentityTensor",
        "IdentityTensorStorage",
    ),
    _ROUTER: ("router.QBHistogramMode",),
    _LINEAR_ATTENTION: (
        "GatedDeltaNet2Attention",
        "GatedDeltaNetAttention",
        "GatedDeltaProductAttention",
    ),
    "use LayerNormLinear for the up-projection and apply_rotary_pos_emb for its result": (
        "FusedMLAQUpProjFunction",
        "FusedMLAQUpProjRopeQuant",
    ),
}
NOT_OFFERED: Mapping[str, str] = {
    name: instead for instead, names in _GROUPS.items() for name in names
}
"""The alternative for each name of ``transformer_engine.pytorch``; those of its modules, and of its
recipes, with the module in front: ``ops.AllGather``."""

COMMUNICATION = frozenset(name for names in _COMMUNICATION_GROUPS.values() for name in names)
"""Names that belong to several ranks which exchange tensors."""


def refusal(name: str) -> str | None:
    """Return the message that fp8core has no ``name``, with the alternative; None for other names.

    >>> refusal("IdentityTensor")
    'fp8core offers no IdentityTensor: IdentityQuantizer returns a plain tensor.'
    """
    instead = NOT_OFFERED.get(name)
    return None if instead is None else f"fp8core offers no {name}: {instead}."


def absent(module: str, name: str, places: Mapping[str, str]) -> str:
    """Return the message that ``module`` has no ``name``, with the nearest of ``places``, whose
    names are written from ``module`` as the values.

    >>> absent("fp8core", "PerLayr", {"Linear": "Linear", "PerLayer": "recipe.PerLayer"})
    "module 'fp8core' has no attribute 'PerLayr'. Did you mean 'recipe.PerLayer'?"
    """
    near = None if name.startswith("_") else nearest(name, places)
    hint = "" if near is None else f". Did you mean {places[near]!r}?"
    return f"module {module!r} has no attribute {name!r}{hint}"
