"""The state that is active for this thread: autocast, recomputes, checkpoints, graphs."""
