"""`python -m lowvram.report FOLDER...`: makes the report of one sweep, or one of several."""

import sys

from lowvram.results.report import main
from lowvram.start import outlasting

if __name__ == "__main__":
    outlasting()
    sys.exit(main())
