"""The formats of exports besides safetensors: weights of few bits, and graphs that run without lowvram.

loops/export/folder.py imports this package when a format is asked for. Begin with weights.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lowvram.compress.formats.graph import TorchExport
from lowvram.compress.formats.onnx import Onnx
from lowvram.compress.formats.pt2e import Pt2e
from lowvram.compress.formats.weights import int4, int8, int8_dynamic
from lowvram.compress.qat import GROUP
from lowvram.config.transforms import ExportFormat
from lowvram.loops.export.format import Format

# Told how many weights of a row share a scale in 4 bits; None: as many as usual.
FORMATS: Mapping[ExportFormat, Callable[[int | None], Format]] = {
    ExportFormat.torch_export: lambda _: TorchExport(),
    ExportFormat.onnx: lambda _: Onnx(),
    ExportFormat.int8: lambda _: int8(),
    ExportFormat.int8_dynamic: lambda _: int8_dynamic(),
    ExportFormat.int4: lambda group: int4(group or GROUP),
    ExportFormat.pt2e: lambda _: Pt2e(),
}
