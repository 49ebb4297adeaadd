"""Measurements that mlm/bench/README.md cites, each a program: `python -m tests.measure.simulate`."""
