"""The loops. Each runs the one `step` and returns what it knows of the row."""
