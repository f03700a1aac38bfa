"""The command line: has Hydra compose the typed words, runs each point, prints the results.

Imports no torch and nothing of worker, and may import all lower packages. Begin with main.py; start.py comes before it.
"""
