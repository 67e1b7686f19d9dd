"""Inspection without a run: ``explain``, and the descriptors that recipes and layers need."""
