"""lowvram: train models on a GPU that is too small, and know what every choice costs."""

__version__ = "0.1.0"
