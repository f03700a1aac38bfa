"""A point's processes: how they start, exchange messages with the parent, and end. Imports no torch.

Starts the worker by its name. Begin with point.py (what is to run) and client.py (the parent's end of the fork server);
fork_server.py and supervisor.py are the process between the two.
"""
