"""Checkpoints that any world reads: one file a rank, checked sums, no code run."""
