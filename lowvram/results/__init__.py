"""Results: the row of a point, and its views in files, in the terminal, in a report and at loggers. Imports no torch.

Begin with row.py.
"""
