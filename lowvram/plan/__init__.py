"""Planning: what a point will need, before it runs."""
