"""From a descriptor to a callable: discovery, policy, choice, and the resolved table."""
