"""Models: plain modules that know no knob, each with the configuration that describes it.

Imports data, core, config and compat. Begin with builtin.py, then transformer.py.
"""
