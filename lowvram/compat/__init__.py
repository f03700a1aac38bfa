"""Private names of other libraries, one function each: what a new version breaks, it breaks here.

Imports nothing of ours.
"""
