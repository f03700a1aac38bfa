"""The knobs: one module, or one package, for each group. A knob imports core and config, never another knob.

docs/adding_a_knob.md says how to add one.
"""
