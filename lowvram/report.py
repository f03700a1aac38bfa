"""`python -m lowvram.report FOLDER...`: makes the report of one sweep, or one of several."""

import sys

from lowvram.launch.streams import protect_streams
from lowvram.results.report.report import main

if __name__ == "__main__":
    protect_streams()
    sys.exit(main())
