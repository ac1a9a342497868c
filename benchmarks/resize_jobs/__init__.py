"""What `resize.py` runs."""
