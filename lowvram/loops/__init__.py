"""The loops: each runs the one `step` of core over batches and returns what it knows of the row.

Imports tasks, models, data, knobs, results and below. Begin with session.py (all that a loop works with), then train.py
and measure.py.
"""
