"""``fp8core doctor``: the installed backends and plug-ins, whether they work here, the settings."""
