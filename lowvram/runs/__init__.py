"""One point in the parent: locks its folder, runs its processes, records their events. Imports no torch.

Begin with run.py; recorder.py turns events into logged figures and a row.
"""
