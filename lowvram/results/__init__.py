"""Results: the row of a point, and its views in files, in the terminal and in W&B. Imports no torch."""
