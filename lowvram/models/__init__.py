"""Models: plain modules that know no knob, each with the configuration that describes it."""
