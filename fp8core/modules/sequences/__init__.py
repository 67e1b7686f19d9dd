"""Sequences of tokens in attention: layouts, lengths, masks, caches, heads and rotary positions."""
