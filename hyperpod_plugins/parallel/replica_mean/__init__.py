"""The mean of gradients over replicas: flat, in a fixed order, or with the noise between them."""
