"""Train a mixture of experts: a router, grouped linears, and rows sent to them and back."""

import torch
from torch import nn

import fp8core as te

EXPERTS, TOP = 4, 2


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, EXPERTS, bias=False)
        self.fc1 = te.GroupedLinear(EXPERTS, 64, 128, bias=False)
        self.fc2 = te.GroupedLinear(EXPERTS, 128, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs, chosen = te.router.fused_topk_with_score_function(
            self.router(x), TOP, False, None, None, None, "softmax", None
        )
        rows, row_id_map = te.moe_permute(x, chosen, x.shape[0] * TOP)
        splits = chosen.sum(0).tolist()
        rows = self.fc2(nn.functional.gelu(self.fc1(rows, splits)), splits)
        return te.moe_unpermute(rows, row_id_map, merging_probs=probs)


torch.manual_seed(0)
model, x, losses = Mixture(), torch.randn(128, 64), []
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for _ in range(20):
    with te.autocast(recipe="current"):
        loss = (model(x) - x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < 0.5 * losses[0]
assert all(parameter.grad is not None for parameter in model.parameters())
