"""Average gradients over replicas in place of FSDP2: in a fixed order, or while measuring gradient noise."""
