"""Exit codes of the command line."""

from __future__ import annotations

EXIT_FAILED, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 3, 75
