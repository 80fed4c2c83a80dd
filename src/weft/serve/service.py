"""What both protocols answer besides queries, as plain data: metadata, index and statistics."""

from __future__ import annotations

from collections.abc import Mapping

import weft
from weft.serve.served import Served
from weft.serve.server import Server
from weft.serve.statistics import Snapshot, Span

EXTENSIONS = ("binary_tensor_data", "model_repository", "model_repository(unload_dependents)", "statistics")
PLATFORM = "weft"
Data = dict[str, object]


def server_metadata() -> Data:
    """Name, version, extensions."""
    return {"name": "weft", "version": weft.__version__, "extensions": list(EXTENSIONS)}


def model_metadata(server: Server, served: Served) -> Data:
    """What a model takes and gives."""
    signature = served.signature

    def tensors(kind: str) -> list[Data]:
        specs = signature.inputs if kind == "inputs" else signature.outputs
        return [{"name": s.name, "datatype": s.datatype, "shape": signature.shape_of(s)} for s in specs]

    return {
        "name": served.name,
        "versions": server.versions(served.name),
        "platform": PLATFORM,
        "inputs": tensors("inputs"),
        "outputs": tensors("outputs"),
    }


def model_config(served: Served) -> Data:
    """What Triton's clients ask to know whether queries may have rows."""
    signature = served.signature

    def tensors(kind: str) -> list[Data]:
        specs = signature.inputs if kind == "input" else signature.outputs
        return [{"name": s.name, "data_type": f"TYPE_{s.datatype}", "dims": list(s.shape)} for s in specs]

    return {
        "name": served.name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "max_batch_size": signature.max_rows if signature.packs else 0,
        "input": tensors("input"),
        "output": tensors("output"),
    }


def index(server: Server, *, ready: bool = False) -> list[Data]:
    """All models that there are, or those that are ready."""
    rows = [r for r in server.index() if not ready or r.state == "READY"]
    return [{"name": r.name, "version": r.version, "state": r.state, "reason": r.reason} for r in rows]


def statistics(served: Served) -> Data:
    """What a model has answered, in nanoseconds."""
    now: Snapshot = served.statistics.snapshot()
    batches = [
        {"batch_size": rows, "compute_input": _span(a), "compute_infer": _span(b), "compute_output": _span(c)}
        for rows, (a, b, c) in sorted(now.batches.items())
    ]
    inference: Mapping[str, Data] = {
        "success": _span(now.answered), "fail": _span(now.failed), "queue": _span(now.queue),
        "compute_input": _span(now.pack), "compute_infer": _span(now.compute), "compute_output": _span(now.split),
        "cache_hit": _span(Span()), "cache_miss": _span(Span()),
    }  # fmt: skip
    return {
        "name": served.name,
        "version": served.version,
        "last_inference": now.last_ms,
        "inference_count": now.rows,
        "execution_count": sum(b.count for _, b, _ in now.batches.values()),
        "inference_stats": inference,
        "batch_stats": batches,
        "memory_usage": [],
    }


def _span(span: Span) -> Data:
    return {"count": span.count, "ns": round(span.seconds * 1e9)}
