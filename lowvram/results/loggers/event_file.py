"""One of TensorBoard's event files, written with the package tensorboard. Needs no torch.

torch.utils.tensorboard, which would import torch, writes the same records with the same classes. Each record is flushed
at once, so that an open page shows it, and a kill loses nothing.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, final

from tensorboard.plugins.hparams import metadata, summary_v2
from tensorboard.summary.writer.record_writer import RecordWriter

# Protobuf makes their classes when they are imported, so type checkers see none.
EVENT: Any = import_module("tensorboard.compat.proto.event_pb2")
SUMMARY: Any = import_module("tensorboard.compat.proto.summary_pb2")
TENSOR: Any = import_module("tensorboard.compat.proto.tensor_pb2")
TYPES: Any = import_module("tensorboard.compat.proto.types_pb2")
HPARAMS: Any = import_module("tensorboard.plugins.hparams.plugin_data_pb2")
STATUS: Any = import_module("tensorboard.plugins.hparams.api_pb2")
VERSION = "brain.Event:2"  # of the format


@final
class EventFile:
    """A new file in `folder`, whose earlier files, of the same run, it continues."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        number = len(list(folder.iterdir()))  # readers take the files in the order of their names
        name = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}.{number}"
        self._file = RecordWriter((folder / name).open("xb"))
        self._write(file_version=VERSION)

    def forget_after(self, step: int) -> None:
        """Readers drop what was written so far of later steps."""
        self._write(step=step + 1, session_log=EVENT.SessionLog(status=EVENT.SessionLog.START))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._summary(step, *(SUMMARY.Summary.Value(tag=name, simple_value=value) for name, value in values.items()))

    def text(self, tag: str, text: str) -> None:
        """A text in Markdown."""
        plugin = SUMMARY.SummaryMetadata(plugin_data=SUMMARY.SummaryMetadata.PluginData(plugin_name="text"))
        tensor = TENSOR.TensorProto(dtype=TYPES.DT_STRING, string_val=[text.encode()])
        self._summary(0, SUMMARY.Summary.Value(tag=tag, metadata=plugin, tensor=tensor))

    def begin_trial(self, name: str, hyperparameters: Mapping[str, bool | float | str]) -> None:
        self._write(step=0, summary=summary_v2.hparams_pb(dict(hyperparameters), trial_id=name))

    def end_trial(self, is_ok: bool) -> None:
        status = STATUS.STATUS_SUCCESS if is_ok else STATUS.STATUS_FAILURE
        end = HPARAMS.HParamsPluginData(
            session_end_info=HPARAMS.SessionEndInfo(status=status, end_time_secs=time.time())
        )
        about, tag = metadata.create_summary_metadata(end), metadata.SESSION_END_INFO_TAG
        self._summary(0, SUMMARY.Summary.Value(tag=tag, metadata=about, tensor=metadata.NULL_TENSOR))

    def close(self) -> None:
        self._file.close()

    def _summary(self, step: int, *values: Any) -> None:
        self._write(step=step, summary=SUMMARY.Summary(value=values))

    def _write(self, **content: Any) -> None:
        self._file.write(EVENT.Event(wall_time=time.time(), **content).SerializeToString())
        self._file.flush()
