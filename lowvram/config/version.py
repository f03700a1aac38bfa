"""The version of lowvram."""

__version__ = "0.1.0"
