"""A point's processes: how they start, exchange messages with the parent, and end. Imports no torch.

It imports nothing of the worker, but starts it by its module's name. Begin with spec.py (what is to run) and client.py
(the parent's end of the fork server); fork_server.py and supervisor.py run in the process between parent and child.
"""
