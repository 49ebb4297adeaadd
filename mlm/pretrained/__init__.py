"""Loading the model of a run, of a transformers folder or of the Hub, and starting from it."""
