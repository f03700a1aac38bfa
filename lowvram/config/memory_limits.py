"""Limits on a process's memory, and what Python's own code makes of memory that it doesn't get. Imports no torch."""

from __future__ import annotations

import resource

WITHOUT_REASON = "error return without exception set"  # of CPython's own code
WITHOUT_SOURCE = "could not get source code"  # of inspect, where linecache found no room for a file


def is_hidden_in(error: BaseException) -> bool:
    """Whether an error of Python's own code may stand for memory that it didn't get."""
    if isinstance(error, SystemError):
        return WITHOUT_REASON in str(error)
    return isinstance(error, OSError) and str(error) == WITHOUT_SOURCE


def are_set() -> bool:
    """Whether this process may have a certain number of addresses, or bytes of data, alone."""
    limits = (resource.getrlimit(each)[0] for each in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return any(limit != resource.RLIM_INFINITY for limit in limits)
