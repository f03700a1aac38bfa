"""The process that computes: runs the point that a folder describes, writes its files, and tells what it does.

It imports all packages except cli and the clients of search, fidelity and planning. Begin with main.py (one rank of a
point, or a question), then job.py (from the specification to the fields of the row); asks.py has the questions, and
__main__.py is the command `python -m lowvram.worker FOLDER`.
"""
