"""Files that survive crashes: written atomically, with checksums, in folders that one program locks.

Begin with durable.py (how a file is written) and claim.py (who may write in a folder). Imports no torch.
"""
