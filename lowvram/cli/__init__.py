"""The command line: reads the words, has Hydra compose them, runs each point, prints what was found.

Imports no torch, nothing of worker, and all rooms below. Begin with main.py; start.py comes before it.
"""
