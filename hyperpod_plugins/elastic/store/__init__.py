"""The job store: the key-value store through which the members and agents of a job communicate."""
