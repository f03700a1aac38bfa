"""Private names of other libraries, one function or class each, so that a new version of one breaks code only here.

Each docstring says since when the library has the name, why we need it, and what would replace it. Imports nothing of
ours.
"""
