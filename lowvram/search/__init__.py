"""mode=search: the fastest configurations that fit a budget.

client.py runs in the parent (no torch): it starts the search and runs the best candidates as points. worker.py finds
the candidates by their plans; space.py says which combinations there are.
"""
