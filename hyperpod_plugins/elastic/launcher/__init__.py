"""`hyperpodrun`: the agent of a node, its workers, and the fork server that starts them."""
