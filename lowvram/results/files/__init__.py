"""Files that outlive whoever writes them: written whole, with checksums, in folders that one program holds.

Begin with durable.py (how a file is written) and run_folder.py (whose a folder is). Imports no torch.
"""
