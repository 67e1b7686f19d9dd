"""What is active for this thread, now: autocast, recomputes, checkpoints, graphs."""
