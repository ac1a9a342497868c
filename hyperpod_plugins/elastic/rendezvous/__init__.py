"""How the agents of a job find each other, with torchrun or with `hyperpodrun`."""
