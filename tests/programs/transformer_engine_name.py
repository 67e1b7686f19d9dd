"""A script for Transformer Engine, unchanged but for the first two lines of code."""

from fp8core import transformer_engine

transformer_engine.install()

import torch  # noqa: E402
import transformer_engine.pytorch as te  # noqa: E402
from transformer_engine.common import recipe  # noqa: E402

torch.manual_seed(0)
fp8_recipe = recipe.DelayedScaling(
    margin=0, fp8_format=recipe.Format.HYBRID, amax_history_len=16, amax_compute_algo="max"
)
device = torch.get_default_device()
model = te.LayerNormMLP(64, 128, params_dtype=torch.bfloat16, device=device)
optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-2, master_weights=True)
x, losses = torch.randn(64, 64, dtype=torch.bfloat16), []
for _ in range(20):
    with te.fp8_autocast(enabled=True, fp8_recipe=fp8_recipe):
        out = model(x)
    loss = (out.float() - x.float()).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < 0.7 * losses[0]
forward = model.fp8_meta["scaling_fwd"]
assert forward.amax_history.shape[0] == 16
assert (forward.amax_history[:, 0] > 0).any()
assert (forward.scale != 1).any()
torch.testing.assert_close(forward.scale * forward.scale_inv, torch.ones_like(forward.scale))
