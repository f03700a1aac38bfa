"""Models: plain modules that know no knob. Each file has a config, which is the model's whole description, and its module."""
