"""`hyperpodrun`: the agent of a node and its workers."""
