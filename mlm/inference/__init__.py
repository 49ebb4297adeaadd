"""A loaded model and texts in, answers out."""
