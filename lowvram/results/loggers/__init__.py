"""Loggers: views of a run beside result.json and metrics.jsonl, which stay the record of truth. Imports no torch.

`logger.py` is the interface, `wandb.py` and `tensorboard.py` implement it, `all.py` runs those that `logger.*` switches
on. `wandb_sweep.py` is the table of a sweep at W&B. Begin in logger.py.
"""
