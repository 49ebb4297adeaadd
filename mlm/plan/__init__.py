"""The step compiled for a TPU that is not attached: its memory, its time, and where the time goes."""
