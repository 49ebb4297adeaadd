"""The model and its objective: transformers' Flax RoBERTa, masks drawn on the device, a head on masked tokens."""
