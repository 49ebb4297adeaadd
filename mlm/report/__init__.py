"""`report`: what a run did, or several runs, on one HTML page. Nothing here imports jax."""
