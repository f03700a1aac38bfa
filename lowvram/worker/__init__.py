"""The process that computes: runs the one request that its parent sends, and sends events until its end.

Started by launch, by its name. Imports all rooms but cli, search's and planning's clients. Begin with main.py (what a
request asks for), then job.py (one point, from its configuration to the fields of its row).
"""
