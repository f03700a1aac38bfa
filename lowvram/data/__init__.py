"""Where samples come from (sources) and how they are read (loaders): pure functions of seed, epoch and index.

Begin with spec.py (what a model has to know of the data), source.py and loader.py.
"""
