"""`bench`: our step, shards and batches beside the baselines, by interleaved timing."""
