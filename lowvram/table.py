"""`python -m lowvram.table FOLDER`: rebuilds, prints and saves the table of a sweep."""

import sys

from lowvram.results.table import main
from lowvram.start import outlasting

if __name__ == "__main__":
    outlasting()
    sys.exit(main())
