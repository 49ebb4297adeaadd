"""What launch/tpu.py and launch/local_pod.py are made of: the standard library alone."""
