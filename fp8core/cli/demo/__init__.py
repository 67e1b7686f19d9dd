"""The ``fp8core demo`` command: one small language model, trained in bf16 and in every recipe.

``data`` reads and splits the text, ``model`` is the network, ``train`` trains it, ``report`` prints
and stores the results, and ``cli`` is the command.
"""
