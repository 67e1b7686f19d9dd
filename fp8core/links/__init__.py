"""Operations that a layer is a tuple of; :mod:`fp8core.chain` runs them under one autograd node."""
