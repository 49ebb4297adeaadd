"""`bench`: our step, shards and batches beside the stock ones, in turns."""
