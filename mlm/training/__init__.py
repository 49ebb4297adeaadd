"""The training step and the loop around it: optimizer, shardings, state, step, checkpoints, metrics."""
