"""The model and its objective: transformers' models, masks drawn on the device, a head on masked tokens."""
