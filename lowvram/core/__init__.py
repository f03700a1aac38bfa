"""What a knob is, what it may change, and the one training step. Imports torch, and of ours config alone.

Begin with knob.py, rig.py, step.py; assemble.py puts the rig together.
"""
