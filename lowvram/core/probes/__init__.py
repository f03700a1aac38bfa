"""Trials that answer questions about models which several rooms ask; each in a file of its own.

Begin with fake_pass.py, then writes.py, a short one. What is asked by one knob alone is in that knob's folder.
"""
