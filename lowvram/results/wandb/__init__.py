"""W&B: run.py is a point's run there, sweep.py the table and the charts of a whole sweep. Imports no torch."""
