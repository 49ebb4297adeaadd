"""One file a command: its flags and what it does."""
