"""Runs OPAQUE primitives of the ONNX front end: one ONNX Runtime session per payload, which never names a file."""

from __future__ import annotations

import base64
import binascii
import json
import os
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np

from weft.errors import ArtifactError, DeviceError
from weft.generate.library.onnx_wire import carries_its_data
from weft.ir.types import Array

MAX_SESSIONS = 256
_sessions: OrderedDict[str, tuple[Any, list[str]]] = OrderedDict()
_lock = Lock()


def _session(payload: str) -> tuple[Any, list[str]]:
    with _lock:
        found = _sessions.get(payload)
        if found is not None:
            _sessions.move_to_end(payload)
            return found
    try:
        import onnxruntime
    except ImportError:
        raise DeviceError(
            problem="the model has ONNX operators that only ONNX Runtime can run: install onnxruntime"
        ) from None
    try:
        model = base64.b64decode(json.loads(payload)["model"], validate=True)
    except (binascii.Error, KeyError, TypeError, ValueError):
        raise DeviceError(problem="an opaque ONNX operator with a damaged payload") from None
    if not carries_its_data(model):
        raise ArtifactError(
            problem="an opaque ONNX operator names a file for its data", remedy="compile the model again"
        )
    options = onnxruntime.SessionOptions()
    # no file is ever read for it: what the check above would miss ends here
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.devnull)
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    try:
        session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # the runtime's own classes share no public base
        raise DeviceError(problem=f"ONNX Runtime refuses an operator: {str(error).splitlines()[0][:200]}") from error
    made = (session, [i.name for i in session.get_inputs()])
    with _lock:
        _sessions[payload] = made
        while len(_sessions) > MAX_SESSIONS:
            _sessions.popitem(last=False)
    return made


def run_onnx(payload: str, inputs: Sequence[Array]) -> list[Array]:
    """Results of one opaque operator, in the order of `OpaqueAttrs.types` (bf16 as exact float32).

    Raises:
        ArtifactError: a payload whose data lie elsewhere: none that this Weft makes [W401].
        DeviceError: ONNX Runtime is not installed, or refuses the operator or its inputs [W301].
    """
    session, names = _session(payload)
    if len(names) != len(inputs):
        raise DeviceError(problem=f"an opaque ONNX operator takes {len(names)} inputs, got {len(inputs)}")
    feed = {name: np.asarray(x, order="C") for name, x in zip(names, inputs, strict=True)}
    try:
        return [np.asarray(y) for y in session.run(None, feed)]
    except Exception as error:  # as above
        raise DeviceError(problem=f"ONNX Runtime failed: {str(error).splitlines()[0][:200]}") from error
