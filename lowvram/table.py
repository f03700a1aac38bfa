"""`python -m lowvram.table FOLDER`: rebuilds, prints and saves the table of a sweep."""

import sys

from lowvram.launch.streams import protect_streams
from lowvram.results.table import main

if __name__ == "__main__":
    protect_streams()
    sys.exit(main())
