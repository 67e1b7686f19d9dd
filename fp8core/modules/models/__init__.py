"""Whole models: the layers in them, their names, frozen weights, graphs and found infinities."""
