"""measure.fidelity=true: how far a point's gradients and losses are from training without any saving.

client.py runs in the parent (no torch): it starts the reference runs and compares. worker.py is the mode of the
processes that it starts; reference.py defines the reference.
"""
