"""The step compiled for a TPU or GPU that is not attached: its memory, its time, and where the time goes."""
