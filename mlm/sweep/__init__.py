"""Many runs of a command: their folders, their scores in one table, and whether two models differ."""
