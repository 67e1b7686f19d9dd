r"""A pytest plug-in that runs Megatron-core's own unit tests on a CPU, unmodified, on fp8core.

No release of Megatron-core has its tests; copy those of its repository that fit 0.16.1 into a
folder (test_mlp.py, test_attention.py, test_transformer_layer.py, test_fp8_utils.py), and run::

    python -m pytest -p tests.integrations.megatron_cpu -c /dev/null --noconftest \
        -p no:warnings FOLDER

``--world-size 8`` is that of a group without other processes, whose collectives return what was in
their results; ``--recipe DelayedScaling`` runs each test inside of an ``fp8_autocast``, and
``--without-alias`` without a Transformer Engine. What Megatron needs is what ``megatron_gpt``
lists, and that tensors and modules stay on the CPU where a test asks for CUDA.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

from fp8core import transformer_engine as alias


class Utils:
    """In the place of Megatron's class, which asks for NCCL."""

    world_size = 1

    @classmethod
    def initialize_distributed(cls) -> None:
        if dist.is_initialized():
            return
        if cls.world_size == 1:
            dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
            return
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", rank=0, world_size=cls.world_size, store=FakeStore())

    @staticmethod
    def destroy_model_parallel() -> None:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()

    @classmethod
    def initialize_model_parallel(cls, *sizes: int, **options: Any) -> None:
        from megatron.core import parallel_state

        cls.destroy_model_parallel()
        cls.initialize_distributed()
        if cls.world_size > 1:
            options["create_gloo_process_groups"] = False
        parallel_state.initialize_model_parallel(*sizes, **options)


class _OnCpu(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--world-size", type=int, default=1)
    parser.addoption("--recipe", default=None)
    parser.addoption("--without-alias", action="store_true")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "internal: Megatron's mark")
    Utils.world_size = config.getoption("--world-size")
    if not config.getoption("--without-alias"):
        alias.install()
    package, module = ModuleType("tests.unit_tests"), ModuleType("tests.unit_tests.test_utilities")
    module.Utils = Utils  # type: ignore[attr-defined]  # the name that tests import
    sys.modules.update({one.__name__: one for one in (package, module)})
    _stay_on_cpu()


def _stay_on_cpu() -> None:
    fakes: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "current_device": lambda: torch.device("cpu"),
            "synchronize": lambda *_: None,
            "manual_seed": torch.manual_seed,
            "get_rng_state": lambda *_, **__: torch.get_rng_state(),
            "set_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
        },
        torch.Tensor: {"cuda": lambda self, *_, **__: self},
        torch.nn.Module: {"cuda": lambda self, *_, **__: self},
    }
    from megatron.core.tensor_parallel import random as megatron_random

    fakes[megatron_random] = {
        "_get_cuda_rng_state": lambda *_, **__: torch.get_rng_state(),
        "_set_cuda_rng_state": lambda state, *_, **__: torch.set_rng_state(state),
    }
    for owner, names in fakes.items():
        for name, value in names.items():
            setattr(owner, name, value)


@pytest.fixture(autouse=True)
def on_cpu(request: pytest.FixtureRequest) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        stack.enter_context(_OnCpu())
        name = request.config.getoption("--recipe")
        if name is not None:
            import transformer_engine.pytorch as te
            from transformer_engine.common import recipe

            asked = getattr(recipe, name)()
            stack.enter_context(te.fp8_autocast(enabled=True, fp8_recipe=asked))
        yield
