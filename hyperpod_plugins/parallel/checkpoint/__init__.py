"""Sharded checkpoints that any world can read: one file per rank, verified checksums, no code execution on load."""
