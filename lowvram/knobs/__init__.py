"""The knobs: one module or package for each group. A knob imports compat, config and core, never another group's knob.

docs/adding_a_knob.md says how to add one.
"""
