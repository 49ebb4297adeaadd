"""Which process of how many this is, how they meet, agree and stop together."""
