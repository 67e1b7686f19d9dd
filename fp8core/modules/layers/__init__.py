"""Layers of linears, norms and operations, and the links of those that lie on several ranks."""
