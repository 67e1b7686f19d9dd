"""A package of AOTInductor against forward.

Opt-in, because a C++ compiler takes about 20 s of a core: FP8CORE_TEST_AOT_INDUCTOR=1.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import fp8core as te
from fp8core import recipe

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("FP8CORE_TEST_AOT_INDUCTOR"), reason="set FP8CORE_TEST_AOT_INDUCTOR=1"
    ),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # torch's own
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_package_of_a_transformer_layer_equals_forward(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, x = te.TransformerLayer(64, 128, 4).eval().to(dtype), torch.randn(8, 4, 64).to(dtype)
    with torch.no_grad(), te.autocast(recipe=recipe.Float8CurrentScaling()):
        want, program = model(x), torch.export.export(model, (x,))
    path = torch._inductor.aoti_compile_and_package(
        program,
        package_path=str(tmp_path / "model.pt2"),
        inductor_configs={
            "aot_inductor.compile_wrapper_opt_level": "O0",
            "emulate_precision_casts": True,
        },
    )
    assert torch.equal(torch._inductor.aoti_load_package(path)(x), want)
