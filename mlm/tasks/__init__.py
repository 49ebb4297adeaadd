"""What the loop trains: pretraining and classification."""
