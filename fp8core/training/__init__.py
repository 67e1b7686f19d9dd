"""The parts of a training loop around the layers: optimizers, loss, routing, offloading."""
