"""Models of runs, of transformers folders and of the hub: loading them, and starting from them."""
