"""Plan: what a point would hold, and how fast it would be, before it runs."""
