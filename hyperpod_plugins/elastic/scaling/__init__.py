"""How the batch, the learning rate and the number of nodes follow each other."""
