"""Conversion of an existing model: which layers, how they are swapped, and what came of it."""
