"""Python runs this file at its start when its folder is on PYTHONPATH. It arms the fork server, and nothing else."""

import sys

if "lowvram.launch.fork_server" in sys.orig_argv:
    import faults

    faults.arm()
