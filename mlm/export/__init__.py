"""`export`: the model as a transformers folder with its card, proven in PyTorch, and pushed."""
