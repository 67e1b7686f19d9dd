"""A call of a layer: what every layer inherits, its parameters, the checks of its input, and how it
is bound to a recipe."""
