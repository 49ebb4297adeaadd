"""A step compiled for a TPU that is not there: its memory, its time, and what both are made of."""
