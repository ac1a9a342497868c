"""The rendezvous `hyperpod`, through which the agents of a job find each other, with torchrun or `hyperpodrun`."""
