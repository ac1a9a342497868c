"""Benchmarks of one rank on one GPU, which `make gpu` runs; on a CPU `--quick` shows that they work."""
