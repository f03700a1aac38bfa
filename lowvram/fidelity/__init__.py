"""measure.fidelity=true: how far a point's gradients and losses are from training without any saving.

client.py is the parent's (no torch): it runs references and compares. worker.py is what their processes do;
reference.py says what a reference is.
"""
