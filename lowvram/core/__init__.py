"""What a knob is, what it may change, and the one training step. Imports torch, and of ours only config and compat.

Begin with knob.py, rig.py, step.py; assemble.py puts the rig together.
"""
