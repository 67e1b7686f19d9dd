"""Quantized tensors and what they keep: quantizers, delayed scales, kept weights."""
