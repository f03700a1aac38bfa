"""What a knob is, what it may change, and the one training step. Imports torch and nothing of ours but config."""
