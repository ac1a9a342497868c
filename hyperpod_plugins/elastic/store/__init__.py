"""What the members of a job leave for each other in a key-value store."""
