"""mode=search: the fastest configurations that fit a budget.

client.py is the parent's (no torch): it has candidates found and runs the best as points. worker.py finds them by their
plans; space.py says which combinations there are.
"""
