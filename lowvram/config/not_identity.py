"""The keys of the configuration that are left out of a point's id. Imports nothing."""

from __future__ import annotations

# Keys whose values don't change a result.
NOT_IDENTITY = (
    *("hydra", "paths", "logger", "local", "timeout_s", "resume", "trust", "name", "callbacks"),
    *("plan.skip", "measure.reruns", "optimized_metric", "jobs", "launcher", "loader.cache_folder"),
    *("search.max_seconds", "snapshot.sharded_above_gib", "train.rehearse", "price_per_hour"),
)
# Left out while they are null.
NOT_IDENTITY_IF_NULL = (
    *("devices", "plan.link_bytes_per_s", "optimizer.groups", "optimizer.layer_decay"),
    *("train.patience", "train.max_hours", "snapshot.best"),
)
# Dictionaries whose order counts.
ORDERED = ("optimizer.groups",)
# Groups that came later, left out at their neutral option: points keep the ids that they had without the group.
NEUTRAL_OF_LATER_GROUPS = {"weights": "lowvram.knobs.weights.OnDevice", "ema": "lowvram.knobs.ema.NoAverages"}
# Values of keys that came later, left out likewise.
NEUTRAL_OF_LATER_KEYS = {
    "export.of": "last",
    "train.on_nonfinite": "stop",
    "train.max_skipped": 10,
    "adapter.rank_stabilized": False,
}
