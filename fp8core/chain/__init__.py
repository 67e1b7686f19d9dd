"""A layer as a chain of links, run forward and back under one node of torch's autograd."""
