"""A point's processes: how they are started, what they are told and tell, how they are ended. Imports no torch.

Starts the worker by its name. Begin with point.py (what is to run) and client.py (the parent's end of the fork server);
fork_server.py and supervisor.py are the process between the two.
"""
