"""The command line: has Hydra compose the typed words, runs each point, prints the results.

Imports no torch, nothing of worker, and all rooms below. Begin with main.py; start.py comes before it.
"""
