"""Layers: they name parameters, check their input, and list the ops of a chain."""
