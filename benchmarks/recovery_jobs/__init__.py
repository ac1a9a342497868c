"""The jobs of `benchmarks/recovery.py`: one training program, written for each way to recover it."""
