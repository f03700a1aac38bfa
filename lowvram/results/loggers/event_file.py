"""One of TensorBoard's event files, written with the package tensorboard. Needs no torch.

torch.utils.tensorboard, which would import torch, writes the same records with the same classes. Each record is flushed
at once, so that an open page shows it, and a kill loses nothing.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

VERSION = "brain.Event:2"  # of the format


@cache
def package() -> Any:
    """What is used of tensorboard, by names without their modules. Most are classes that protobuf makes at import,
    which type checkers don't see."""
    modules = "summary.writer.record_writer compat.proto.event_pb2 compat.proto.summary_pb2 compat.proto.tensor_pb2"
    modules += " plugins.hparams.plugin_data_pb2 plugins.hparams.api_pb2 plugins.hparams.metadata"
    modules += " plugins.hparams.summary_v2 compat.proto.types_pb2"
    found = [vars(import_module(f"tensorboard.{module}")) for module in modules.split()]
    return SimpleNamespace(**{name: value for names in found for name, value in names.items()})


@final
class EventFile:
    """A new file in `folder`, whose earlier files, of the same run, it continues.

    Raises:
        ImportError: tensorboard isn't installed.
    """

    def __init__(self, folder: Path) -> None:
        self._tb = package()
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.iterdir()))  # readers take the files in the order of their names
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{number}"
        self._file = self._tb.RecordWriter((folder / name).open("xb"))
        self._write(file_version=VERSION)

    def forget_after(self, step: int) -> None:
        """Readers drop what was written so far of later steps."""
        log = self._tb.SessionLog
        self._write(step=step + 1, session_log=log(status=log.START))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        value = self._tb.Summary.Value
        self._summary(step, *(value(tag=name, simple_value=number) for name, number in values.items()))

    def text(self, tag: str, text: str) -> None:
        """A text in Markdown."""
        metadata = self._tb.SummaryMetadata
        about = metadata(plugin_data=metadata.PluginData(plugin_name="text"))
        tensor = self._tb.TensorProto(dtype=self._tb.DT_STRING, string_val=[text.encode()])
        self._summary(0, self._tb.Summary.Value(tag=tag, metadata=about, tensor=tensor))

    def begin_trial(self, name: str, hyperparameters: Mapping[str, bool | float | str]) -> None:
        self._write(step=0, summary=self._tb.hparams_pb(dict(hyperparameters), trial_id=name))

    def end_trial(self, is_ok: bool) -> None:
        status = self._tb.STATUS_SUCCESS if is_ok else self._tb.STATUS_FAILURE
        ended = self._tb.SessionEndInfo(status=status, end_time_secs=time.time())
        about = self._tb.create_summary_metadata(self._tb.HParamsPluginData(session_end_info=ended))
        tag, tensor = self._tb.SESSION_END_INFO_TAG, self._tb.NULL_TENSOR
        self._summary(0, self._tb.Summary.Value(tag=tag, metadata=about, tensor=tensor))

    def close(self) -> None:
        self._file.close()

    def _summary(self, step: int, *values: Any) -> None:
        self._write(step=step, summary=self._tb.Summary(value=values))

    def _write(self, **content: Any) -> None:
        self._file.write(self._tb.Event(wall_time=time.time(), **content).SerializeToString())
        self._file.flush()
