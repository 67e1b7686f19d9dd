"""The native entries refuse the address 0 of what is not empty; the front end never gets there.

The cases run one after the other in a process of their own, as a kernel that reads from 0 takes its
process with it: of the cases without an answer, the first was at fault.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping

import pytest

pytestmark = pytest.mark.needs_accelerator("cuda")

_NATIVE = """
import torch
from fp8core_backends.cuda import native
library = native.load()
x = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
codes = [torch.empty(64, 64, device="cuda", dtype=torch.uint8) for _ in range(2)]
floats = [torch.ones(4096, device="cuda") for _ in range(4)]
at = [one.data_ptr() for one in (x, *codes, *floats)]
E = library
kind = E.InputType.bfloat16

def cast(*, x=at[0], scale_inv=at[3], workspace=at[4]):
    rule = E.ScaleRule(448.0, 0.0, 3e38, False)
    run = E.Quantize(E.Granularity.tensor, E.Format.e4m3, kind, rule, 0)
    row, column = (at[1], scale_inv, 1), (at[2], scale_inv, 1)
    run((x, 64, 64, 64, *row, *column, 0, 0, 0, workspace), 0)

def gemm(a=at[1], a_scale=at[3], b=at[2], b_scale=at[4], d=at[5], workspace=at[6]):
    types, modes = E.ElementType, E.ScaleMode
    one = E.OperandDesc(types.e4m3, modes.tensor, True, 64)
    desc = E.GemmDesc(
        64, 64, 64, one, one, types.bfloat16, False, types.bfloat16, False, False, 16, 64
    )
    E.Gemm(desc, 0, 0, 1).run(0, (a, a_scale, b, b_scale, 0, d, workspace, 0), 0)

def norm(*, x=at[0], weight=at[3], y=at[1], rstd=at[4], mean=at[5], residual=()):
    run = E.Norm(E.NormKind.layernorm, False, 1e-5, kind, kind, 0)
    given = (weight, E.InputType.float32, 0, E.InputType.float32)
    run((x, 64, 64, 64, *given, y, mean, rstd, *residual), 0)

def quantize_norm(*, x=at[0], weight=at[3], rstd=at[4], scale_inv=at[5], workspace=at[6]):
    rule = E.ScaleRule(448.0, 0.0, 3e38, False)
    norm = E.Norm(E.NormKind.rmsnorm, False, 1e-5, kind, kind, 0)
    cast = E.Quantize(E.Granularity.tensor, E.Format.e4m3, kind, rule, 0)
    given = (weight, E.InputType.float32, 0, E.InputType.float32, 0, rstd, x, 64, 64, 64)
    row, column = (at[1], scale_inv, 1), (at[2], scale_inv, 1)
    E.QuantizeNorm(norm, cast)((*given, *row, *column, 0, 0, 0, workspace), 0)

def norm_backward(*, grad=at[0], x=at[0], rstd=at[4], grad_x=at[1], workspace=at[6]):
    run = E.Norm(E.NormKind.rmsnorm, False, 1e-5, kind, kind, 0)
    weight = (at[3], E.InputType.float32)
    run.backward((grad, 64, 64, 64, x, 64, *weight, 0, rstd, grad_x, at[5], 0, workspace), 0)

def rotary(layout="sbhd", *, x=at[0], freqs=at[3], y=at[4]):
    run = E.Rotary(E.RotaryLayout.__members__[layout], False, False, kind, 0)
    run((x, 8, 1, 8, 64, 512, 512, 64, 1, freqs, 8, 64, 0, 0, 1, y), 0)

def packed_rotary(*, k=at[1], v=at[2]):
    run = E.Rotary(E.RotaryLayout.sbhd, False, False, kind, 0)
    x = (at[0], 8, 1, 4, 64, 256, 256, 64, 1)
    parts = (k, 8, 1, 2, 64, 128, 128, 64, 1, v, 8, 1, 2, 64, 128, 128, 64, 1)
    run((*x, at[3], 8, 64, 0, 0, 1, at[4], *parts), 0)
"""

CASES = {
    "cast of x": "cast(x=0)",
    "cast to scale_inv": "cast(scale_inv=0)",
    "cast without workspace": "cast(workspace=0)",
    "amax of x": "E.Amax(E.Granularity.tensor, kind, 0)((0, 64, 64, 64, at[3], at[4]), 0)",
    "amax to 0": "E.Amax(E.Granularity.tensor, kind, 0)((at[0], 64, 64, 64, at[3]), 0)",
    "gemm a": "gemm(a=0)",
    "gemm b": "gemm(b=0)",
    "gemm scale": "gemm(a_scale=0)",
    "gemm d": "gemm(d=0)",
    "norm of x": "norm(x=0)",
    "norm by a weight": "norm(weight=0)",
    "norm to y": "norm(y=0)",
    "norm to rstd": "norm(rstd=0)",
    "layernorm to a mean": "norm(mean=0)",
    "norm of a sum with nothing": "norm(residual=(0, 64, at[1]))",
    "norm of a sum to nothing": "norm(residual=(at[0], 64, 0))",
    "norm and cast of x": "quantize_norm(x=0)",
    "norm and cast by a weight": "quantize_norm(weight=0)",
    "norm and cast to rstd": "quantize_norm(rstd=0)",
    "norm and cast to scale_inv": "quantize_norm(scale_inv=0)",
    "norm and cast without workspace": "quantize_norm(workspace=0)",
    "norm backward of a gradient": "norm_backward(grad=0)",
    "norm backward of x": "norm_backward(x=0)",
    "norm backward by rstd": "norm_backward(rstd=0)",
    "norm backward to grad_x": "norm_backward(grad_x=0)",
    "norm backward without workspace": "norm_backward(workspace=0)",
    "rotary of x": "rotary(x=0)",
    "rotary by freqs": "rotary(freqs=0)",
    "rotary of packed sequences without bounds": "rotary('thd')",
    "rotary to y": "rotary(y=0)",
    "rotary beside keys": "packed_rotary(k=0)",
    "rotary beside values": "packed_rotary(v=0)",
    "scale update": "E.ScaleUpdate([(0, at[3], at[4], 0, 4, 3)], True, 0)(0)",
    "MXFP8": (
        "E.QuantizeMxfp8(E.Format.e4m3, kind, False, 448.0, 0)("
        "(0, 64, 64, 64, at[1], at[3], 64, 0, 0, 0, 0), 0)"
    ),
    "NVFP4": (
        "E.QuantizeNvfp4(kind, False, 6.0, False, False, False, 0)("
        "(at[0], 64, 64, 64, at[1], at[3], 64, 0, 0, 0, 0, 0, 0, at[4], 0, 0), 0)"
    ),
    "tiles of scales": (
        "E.arrange_scales((0, 1, 64, 64, 2, 1, 0, at[4], at[3], 1, 64, 64, 2, 1, 0, at[5]), 0, 0)"
    ),
}


# What each case raises, or that it ran. Cases are statements, each in a scope that a name makes.
_EACH = """
import json
import sys

for case, (scope, code) in json.loads(sys.argv[1]).items():
    said = "ran"
    try:
        exec(code, eval(scope))
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    torch.cuda.synchronize()
    print(json.dumps([case, said]), flush=True)
"""


def answers(code: str, cases: Mapping[str, tuple[str, str]]) -> tuple[dict[str, str], str]:
    """What each case said in a process that runs ``code`` first; and what that wrote of errors."""
    command = [sys.executable, "-c", code + _EACH, json.dumps(cases)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    return dict(map(json.loads, ran.stdout.splitlines())), ran.stderr


def test_every_entry_refuses_the_address_of_nothing() -> None:
    said, errors = answers(_NATIVE, {case: ("globals()", code) for case, code in CASES.items()})
    assert said.keys() == CASES.keys(), errors
    taken = {
        case: one
        for case, one in said.items()
        if not one.startswith("ValueError: ") or not ("workspace" in one or "address 0" in one)
    }
    assert taken == {}


_LAYERS = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, distribute_tensor
import fp8core as te
from fp8core import QuantizedTensor, ops, recipe
from fp8core.recipe.plan import LayerRole

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
mesh = init_device_mesh("cuda", (1,))

def door(name, kind):
    torch.manual_seed(0)
    layer = te.Linear(64, 64, params_dtype=torch.bfloat16, device="cuda")
    x, dy = (torch.randn(64, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    x.requires_grad_()
    plan = recipe.by_name("current").plan(LayerRole("linear"), x.dtype)

    def wrap(own):
        if kind == "dtensor":
            return distribute_tensor(own.detach(), mesh, [Replicate()])
        return QuantizedTensor.quantize(own.detach(), plan.input)

    def run(module, x, dy=dy):
        with te.autocast(recipe=recipe.by_name(name)):
            y = module(x)
        y.backward(dy)

    return {**globals(), **locals()}
"""

BODIES = {
    "quantized input": "run(layer, wrap(x))",
    "quantized gradient": "run(layer, x, wrap(dy))",
    "quantized into a chain": "run(ops.Sequential(ops.Quantize(), layer), wrap(x))",
    "quantized into a norm": (
        "run(te.LayerNormLinear(64, 64, params_dtype=x.dtype, device='cuda'), wrap(x))"
    ),
    "dtensor input": "run(layer, wrap(x))",
    "dtensor gradient": "run(layer, x, wrap(dy))",
    "dtensor weight": "layer.weight = torch.nn.Parameter(wrap(layer.weight)); run(layer, x)",
}


RECIPES = ("current", "delayed", "block", "rowwise")


def test_subclasses_at_a_layers_door_run_or_are_refused() -> None:
    cases = {
        f"{case} {name}": (f"door({name!r}, {case.partition(' ')[0]!r})", body)
        for name in RECIPES
        for case, body in BODIES.items()
    }
    said, errors = answers(_LAYERS, cases)
    assert said.keys() == cases.keys(), errors
    wanted = {case: "OperandError: " if case.startswith("dtensor") else "ran" for case in cases}
    assert {case: one for case, one in said.items() if not one.startswith(wanted[case])} == {}
