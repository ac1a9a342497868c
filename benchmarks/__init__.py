"""Benchmarks: us and our peers, in turn, on the same machine, in one invocation."""
