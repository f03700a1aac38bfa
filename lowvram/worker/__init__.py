"""The process that computes: runs the one request that its parent sends, and sends events until its end.

The package launch starts it by its module's name. It imports all packages except cli, runs and the clients of search,
fidelity and planning. Begin with main.py (what a request asks for), then job.py (one point, from its configuration to
the fields of its row).
"""
