"""One file per command: `add_arguments` declares its flags, `main` runs it (called by mlm/__main__.py)."""
