"""What every logger is told: figures under their names, and a nested configuration."""

from typing import Any

from lowvram.results.loggers.logger import config_of, final_values
from lowvram.results.row import GIB, Row, empty_row, merge

MEASURED: dict[str, Any] = {
    "memory": {
        "peak_bytes": GIB,
        "reserved_bytes": 2 * GIB,
        "fragmentation_bytes": GIB,
        "inactive_split_bytes": GIB // 2,
        "alloc_retries": 0,
        "by_kind_max": {"parameters": 0, "host": GIB},
    },
    "traffic": {"to_host_bytes": GIB, "to_device_bytes": 2 * GIB, "waited_ms": 3.0},
    "plan": {"allocated_bytes": 3 * GIB},
    "throughput": {"samples_per_s": 5.0, "tokens_per_s": 6.0},
    "time": {"step_ms_p50": 7.0},
    "loss": {"first": 9.0, "last": 1.0, "eval": 2.0},
    "eval": {"accuracy": 0.5, "perplexity": 8.0},
    "fidelity": {"gradient_error": 0.004, "gradient_cosine": 0.9, "loss_gap": 0.0, "losses": [1.0], "reason": None},
}


def ended(status: str, **fields: Any) -> Row:
    return merge(empty_row(), {"status": status, **fields})


def test_the_configuration_is_nested_and_holds_no_dotted_key():
    row = ended("ok", choices={"precision": "bf16"}, provenance={"python": "3.11.7", "device_memory_bytes": 8 * GIB})
    config = config_of({"seed": 1, "optimizer": {"lr": 0.1}}, row)
    assert config["choice"] == {"precision": "bf16"}
    assert config["provenance"] == {"python": "3.11.7", "device_memory_gib": 8.0}
    assert (config["seed"], config["optimizer"]) == (1, {"lr": 0.1})
    assert not [key for key in (*config, *config["choice"], *config["provenance"]) if "." in key]


def test_final_values_use_the_names_of_the_metrics():
    row = ended("ok", **MEASURED)
    assert final_values(row) == {
        "status": "ok",
        "memory/peak_gib": 1.0,
        "memory/reserved_gib": 2.0,
        "memory/fragmentation_gib": 1.0,
        "memory/inactive_split_gib": 0.5,
        "memory/alloc_retries": 0,
        "traffic/to_host_gib": 1.0,
        "traffic/to_device_gib": 2.0,
        "traffic/waited_ms": 3.0,
        "memory/planned_gib": 3.0,
        "memory/parameters_gib": 0,
        "memory/host_gib": 1.0,
        "throughput/samples_per_s": 5.0,
        "throughput/tokens_per_s": 6.0,
        "time/step_ms": 7.0,
        "loss/train": 1.0,
        "loss/eval": 2.0,
        "eval/accuracy": 0.5,
        "eval/perplexity": 8.0,
        "fidelity/gradient_error": 0.004,
        "fidelity/gradient_cosine": 0.9,
        "fidelity/loss_gap": 0.0,
    }
    assert final_values(ended("killed")) == {"status": "killed"}
