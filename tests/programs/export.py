"""Export a trained model: a program of torch that computes the same bits, and a file of ONNX."""

import onnxruntime
import torch

import fp8core as te

recipe = te.recipe.Float8CurrentScaling()
torch.manual_seed(0)
model = torch.nn.Sequential(te.LayerNormLinear(64, 128), torch.nn.GELU(), te.Linear(128, 32)).eval()
x = torch.randn(16, 64)
with torch.no_grad(), te.autocast(recipe=recipe):
    want = model(x)
    program = torch.export.export(model, (x,))
torch.export.save(program, "model.pt2")
assert torch.equal(torch.export.load("model.pt2").module()(x), want)

te.export.to_onnx(model.cpu(), (x.cpu(),), "model.onnx", recipe)
session = onnxruntime.InferenceSession("model.onnx", providers=["CPUExecutionProvider"])
(result,) = session.run(None, {session.get_inputs()[0].name: x.cpu().numpy()})
assert (torch.from_numpy(result).to(want) - want).norm() < 1e-2 * want.norm()
