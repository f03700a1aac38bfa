"""One point in the parent: its folder is taken, its processes run, what they tell is kept. Imports no torch.

Begin with run.py; recorder.py turns events into files, W&B and a row.
"""
