"""Runs OPAQUE primitives of the ONNX front end: one ONNX Runtime session per payload, which never names a file."""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np

from weft.errors import ArtifactError, DeviceError, RefusedError, UnsupportedError
from weft.generate.library.onnx_wire import carries_its_data
from weft.ir.types import Array

MAX_SESSIONS = 256
_sessions: OrderedDict[str, tuple[Any, list[str], list[object]]] = OrderedDict()
"""By payload: session, names of the inputs, shapes of the outputs as the payload says them."""
_lock = Lock()


def _session(payload: str) -> tuple[Any, list[str], list[object]]:
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
        raise _refused(error, payload) from error
    made = (session, [i.name for i in session.get_inputs()], [o.shape for o in session.get_outputs()])
    with _lock:
        _sessions[payload] = made
        while len(_sessions) > MAX_SESSIONS:
            _sessions.popitem(last=False)
    return made


_HEAD = re.compile(r"\[ONNXRuntimeError\] : \d+ : (\w+) : ")
_NODE = re.compile(r"while running (\w+) node\. Name:'[^']*'\s+Status Message:\s*(?:\S+\.(?:cc|h):\d+ \S+ )?")


def _refused(error: Exception, payload: str) -> RefusedError | UnsupportedError:
    """What the runtime says, without its names for its own stages."""
    text = " ".join(str(error).split())
    head, node = _HEAD.search(text), _NODE.search(text)
    kind, op = head[1] if head else "", node[1] if node else "an operator"
    said = text[max(m.end() for m in (head, node) if m) :] if head or node else text
    said = "".join(c if c.isprintable() else "?" for c in said)[:200] or "it does not say why"
    if kind == "NOT_IMPLEMENTED":
        return UnsupportedError(op=op, reason=f"ONNX Runtime has no kernel for it: {said}")
    return RefusedError(problem=f"ONNX Runtime refuses to run {op}: {said}", payload=payload)


def run_onnx(payload: str, inputs: Sequence[Array]) -> list[Array]:
    """Results of one opaque operator, in the order of `OpaqueAttrs.types` (bf16 as exact float32).

    Raises:
        ArtifactError: a payload whose data lie elsewhere: none that this Weft makes [W401].
        DeviceError: ONNX Runtime is not installed [W301].
        RefusedError: it refuses the operator or its inputs [W115].
        UnsupportedError: it has no kernel for the operator [W201].
    """
    session, names, shapes = _session(payload)
    if len(names) != len(inputs):
        raise DeviceError(problem=f"an opaque ONNX operator takes {len(names)} inputs, got {len(inputs)}")
    feed = {name: np.asarray(x, order="C") for name, x in zip(names, inputs, strict=True)}
    try:
        made = [np.asarray(y) for y in session.run(None, feed)]
    except Exception as error:  # as above
        raise _refused(error, payload) from error
    for y, shape in zip(made, shapes, strict=True):
        if list(y.shape) != shape:  # what reads it was made for that one
            problem = f"for these values ONNX Runtime gives a result of shape {list(y.shape)}, the plan takes {shape}"
            raise RefusedError(problem=problem, payload=payload)
    return made
