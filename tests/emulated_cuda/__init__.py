"""An emulated CUDA device: see README.md."""
