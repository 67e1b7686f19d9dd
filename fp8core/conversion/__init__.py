"""Conversion of an existing model: the choice of layers, the swap of their classes, the report."""
