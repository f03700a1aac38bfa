"""A package, so that `tests.laboratory` is ours whatever else is installed."""
