"""The ``fp8core demo`` command: one small language model, trained in bf16 and in every recipe.

``data`` reads and splits the text, ``model`` is the network, ``train`` runs it, ``report`` shows
and stores the results, and ``cli`` ties them to the command line.
"""
