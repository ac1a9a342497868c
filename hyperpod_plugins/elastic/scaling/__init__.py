"""Elastic scaling: how batch and learning rate follow the number of replicas, and the limits of that number."""
