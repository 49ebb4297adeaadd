"""Training pods from a laptop: settings, the cloud behind one seam, one ssh a host, and what the commands do."""
