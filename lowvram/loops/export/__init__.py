"""The trained model as files: plain weights here, weights of few bits and graphs in lowvram/compress/formats.

`load(FOLDER)` reads every format. Begin with folder.py, which finds the formats. Imports tasks and what lies below.
"""

from lowvram.loops.export.folder import load

__all__ = ["load"]
