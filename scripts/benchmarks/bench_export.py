"""What each export format costs: bytes and latency of the file, and the loss through it, after training with and
without qat for equally many tokens.

    scripts/python scripts/benchmarks/bench_export.py [steps] [to=FILE] [overrides]

Trains each model once for each option of qat, then goes on with `resume=RUN export.format=FORMAT`, which trains no step
more, and prints a table. Times are medians of batches through the file and through the fp32 model in turn. Rows are
kept in FILE (outputs/bench_export.jsonl) and not measured again.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lowvram.config.transforms import ExportFormat

ROOT = Path(__file__).parents[2]
QAT_FORMATS = {  # beside safetensors
    "transformer": {"int8": ("int8", "int8_dynamic", "pt2e"), "int4": ("int4",)},
    "resnet": {"int8": ("pt2e",)},
}
WITHOUT_LINEARS = ("int8", "int8_dynamic", "int4")  # that the ResNet can't have
STEPS = 400

Line = dict[str, Any]


def formats_of(model: str, qat: str) -> list[str]:
    """safetensors first."""
    if qat != "none":
        return ["safetensors", *QAT_FORMATS[model][qat]]
    return [each.name for each in ExportFormat if model == "transformer" or each.name not in WITHOUT_LINEARS]


def measured(folder: Path, model: str, qat: str, words: list[str]) -> Iterator[Line]:
    run = folder / f"{model}_{qat}"
    first = [f"model={model}", f"qat={qat}", f"hydra.run.dir={run}", "logger=none", "device=cpu", *words]
    for chosen in formats_of(model, qat):
        start = [f"resume={run}"] if run.exists() else first
        subprocess.run([sys.executable, ROOT / "train.py", *start, f"export.format={chosen}"], check=True)
        row = json.loads((run / "result.json").read_text())
        figures = {"loss": row["loss"]["eval"], "exported": row["eval"]["loss_exported"], **row["export"]}
        peak = {} if start != first else {"peak_bytes": row["memory"]["peak_bytes"]}
        yield {"model": model, "qat": qat, "format": chosen, "words": " ".join(words), **figures, **peak}


def table(lines: list[Line]) -> str:
    plain = {
        line["model"]: line["file_bytes"] for line in lines if (line["qat"], line["format"]) == ("none", "safetensors")
    }
    head = "| model | qat | format | file MB | times smaller | latency | loss before | loss through the file |"
    return "\n".join([head, "|---|---|---|---:|---:|---:|---:|---:|", *(text_of(line, plain) for line in lines)])


def text_of(line: Line, plain: Mapping[str, int]) -> str:
    latency = "" if line["latency_ms"] is None else f"{line['latency_ms'] / line['latency_fp32_ms']:.2f}"
    exported = "" if line["exported"] is None else f"{line['exported']:.4f}"
    smaller = f"{plain[line['model']] / line['file_bytes']:.1f}"
    cells = [line["model"], line["qat"], line["format"], f"{line['file_bytes'] / 1e6:.2f}", smaller, latency]
    return f"| {' | '.join([*cells, format(line['loss'], '.4f'), exported])} |"


def main(words: list[str]) -> None:
    steps = words.pop(0) if words and words[0].isdigit() else STEPS
    files = [word.removeprefix("to=") for word in words if word.startswith("to=")]
    path = Path(files[0] if files else "outputs/bench_export.jsonl")
    words = [f"train.steps={steps}", *(word for word in words if not word.startswith("to="))]
    lines = [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder, path.open("a") as file:
        for model in QAT_FORMATS:
            for qat in ("none", *QAT_FORMATS[model]):
                if any((line["model"], line["qat"]) == (model, qat) for line in lines):
                    continue
                found = list(measured(Path(folder), model, qat, words))
                file.writelines(f"{json.dumps(line)}\n" for line in found)
                file.flush()
                lines += found
    print(table(lines))


if __name__ == "__main__":
    main(sys.argv[1:])
