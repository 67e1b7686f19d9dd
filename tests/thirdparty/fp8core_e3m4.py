"""Linear layers in e3m4, an 8-bit float with a bit more of precision than e4m3, on CPUs."""

import math

import torch

from fp8core.backend_api import (
    Alignment,
    BackendSpec,
    DequantizeDesc,
    GemmDesc,
    Operand,
    OperandSpec,
    Quantized,
    QuantizeDesc,
    bind_method,
    hookimpl,
    variant_of,
)
from fp8core.formats import minifloat
from fp8core.recipe import Float8RowwiseScaling

E3M4 = minifloat("e3m4", 3, 4, specials="ieee")  # seeemmmm, the top exponent for inf and NaN
ROWWISE = OperandSpec("e3m4", (1, 0), E3M4.max)  # one float32 scale a row, all else as by default
FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@hookimpl
def fp8core_register_formats(register):
    register(E3M4)


@hookimpl
def fp8core_register_backends(register):
    factory = "fp8core_e3m4:E3M4Backend"
    register(BackendSpec("e3m4", ("cpu",), factory, preferred_recipe="e3m4", api_version=(6, 1)))


@hookimpl
def fp8core_register_recipes(register):
    register("e3m4", lambda: Float8RowwiseScaling(fp8_format="e3m4"))


class E3M4Backend:
    def unsupported(self, desc, device):
        if type(desc) is QuantizeDesc and not (desc.grouped or variant_of(desc)):
            specs, dtype = {desc.rowwise, desc.columnwise} - {None}, desc.dtype
        elif type(desc) is DequantizeDesc:
            specs, dtype = {desc.operand}, desc.dtype
        elif type(desc) is GemmDesc and not desc.part:
            specs, dtype = {desc.a, desc.b}, desc.out_dtype
        else:
            return "only quantizes, dequantizes and multiplies"
        is_known = specs == {ROWWISE} and dtype in FLOATS
        return None if is_known else f"only e3m4 with one scale a row, not {desc}"

    def alignment(self, desc):
        return Alignment()

    def bind(self, desc, device):
        return bind_method(self, desc)

    def quantize(self, desc, x):  # it declares no groups, delayed or random
        row = None if desc.rowwise is None else _quantize(x)
        return Quantized(row, None if desc.columnwise is None else _quantize(x.t()))

    def dequantize(self, desc, operand):
        return (E3M4.decode(operand.data) * operand.scale_inv).to(desc.dtype)

    def gemm(self, desc, a, b, *, bias=None, out=None):
        product = E3M4.decode(a.data) @ E3M4.decode(b.data).t()  # [m, k] x [n, k] -> [m, n]
        product = product * a.scale_inv * b.scale_inv.t()
        product = product if bias is None else product + bias.float()
        if out is None:
            return product.to(desc.out_dtype)
        return out.copy_(out + product if desc.accumulate else product)


def _quantize(x):  # x [rows, k] in any dtype and any strides
    magnitude = x.float().abs().nan_to_num(nan=0.0, posinf=math.inf)
    amax = torch.nn.functional.pad(magnitude, (0, 1)).amax(1, keepdim=True)  # k may be 0
    scale = (torch.full_like(amax, E3M4.max) / amax).clamp(max=torch.finfo(torch.float32).max)
    scale = torch.where((amax == 0) | amax.isinf(), 1.0, scale)
    return Operand(E3M4.encode(x.float() * scale), torch.ones_like(scale) / scale)
