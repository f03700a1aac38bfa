"""One module per knob group. A knob imports the core and never another knob."""
