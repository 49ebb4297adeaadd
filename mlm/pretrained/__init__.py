"""Trained models to use or to start from."""
