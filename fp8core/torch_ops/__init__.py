"""The backends' operations as ``torch.ops.fp8core.*``, for torch.compile and torch.export."""
