"""Hooks on the metrics: advice and loss spikes."""
