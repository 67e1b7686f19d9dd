"""What a training loop runs around the layers: optimizers, loss, routing, permutation, offload."""
