"""Results: the row of a point, and its views in files, in the terminal, in a report and in W&B. Imports no torch.

Begin with row.py.
"""
