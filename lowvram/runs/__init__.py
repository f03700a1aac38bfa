"""One point in the parent: locks its folder, has its processes started, follows them. Imports no torch.

Begin with run.py; recorder.py tells loggers and callbacks what happens, and row_so_far.py makes a row of it.
"""
