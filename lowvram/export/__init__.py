"""The trained model as files: plain weights, weights of few bits, and graphs that run without lowvram.

`load(FOLDER)` reads every format. Begin with `folder`, which lists the formats. Imports tasks and what lies below.
"""

from lowvram.export.folder import load

__all__ = ["load"]
