"""Kernels and schedules as JSON values and back: for plans, the database and the workers. No pickle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from weft.errors import ArtifactError
from weft.kernels.source import CallStep, CallValue, Kernel, KernelSource, LibraryCall, Ref, Schedule, ScheduleParam

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]


def _bad(what: str) -> ArtifactError:
    return ArtifactError(problem=f"malformed {what}", remedy="make the artifact again with this version of Weft")


def schedule_to_json(schedule: Schedule) -> Json:
    """`{"generator": ..., "params": [[name, value], ...]}`; tuples become lists."""
    params = [[k, list(v) if isinstance(v, tuple) else v] for k, v in schedule.params]
    return {"generator": schedule.generator, "params": params}


def schedule_from_json(data: Json) -> Schedule:
    """Inverse of `schedule_to_json`.

    Raises:
        ArtifactError: not such a value [W401].
    """
    try:
        record = cast("Mapping[str, Json]", data)
        params = []
        for pair in cast("Sequence[Sequence[Json]]", record["params"]):
            name, value = pair
            params.append((str(name), tuple(value) if isinstance(value, list) else value))
        return Schedule(str(record["generator"]), cast("tuple[tuple[str, ScheduleParam], ...]", tuple(params)))
    except (KeyError, TypeError, ValueError):
        raise _bad("schedule") from None


def _value_to_json(value: CallValue) -> Json:
    if isinstance(value, Ref):
        return {"ref": value.kind, "index": value.index}
    if isinstance(value, tuple):
        return [_value_to_json(v) for v in value]
    if isinstance(value, float):
        return {"float": value.hex()}  # infinities and NaN have no JSON form
    return value


def _value_from_json(data: Json) -> CallValue:
    if isinstance(data, Mapping):
        if "float" in data:
            return float.fromhex(str(data["float"]))
        return Ref(str(data["ref"]), int(cast("int", data["index"])))
    if isinstance(data, list):
        return tuple(_value_from_json(v) for v in data)
    return cast("CallValue", data)


def _step_to_json(step: CallStep) -> Json:
    return {
        "target": step.target,
        "args": [_value_to_json(v) for v in step.args],
        "kwargs": [[k, _value_to_json(v)] for k, v in step.kwargs],
        "result": step.result,
    }


def _step_from_json(data: Json) -> CallStep:
    record = cast("Mapping[str, Json]", data)
    kwargs = cast("Sequence[tuple[str, Json]]", record["kwargs"])
    return CallStep(
        str(record["target"]),
        tuple(_value_from_json(v) for v in cast("Sequence[Json]", record["args"])),
        tuple((str(k), _value_from_json(v)) for k, v in kwargs),
        int(cast("int", record["result"])),
    )


def kernel_to_json(kernel: Kernel) -> Json:
    """A tagged record: `{"kind": "source" | "call", ...}`."""
    if isinstance(kernel, KernelSource):
        return {
            "kind": "source",
            "schedule": schedule_to_json(kernel.schedule),
            "text": kernel.text,
            "entry": kernel.entry,
            "workspace_bytes": kernel.workspace_bytes,
            "packed_bytes": list(kernel.packed_bytes),
            "replaces_weights": list(kernel.replaces_weights),
            "flags": list(kernel.flags),
        }
    return {
        "kind": "call",
        "schedule": schedule_to_json(kernel.schedule),
        "prepare": [_step_to_json(s) for s in kernel.prepare],
        "run": [_step_to_json(s) for s in kernel.run],
        "outputs": [_value_to_json(r) for r in kernel.outputs],
        "out_variant": kernel.out_variant,
    }


def kernel_from_json(data: Json) -> Kernel:
    """Inverse of `kernel_to_json`.

    Raises:
        ArtifactError: not such a value [W401].
    """
    try:
        record = cast("Mapping[str, Json]", data)
        schedule = schedule_from_json(record["schedule"])
        if record["kind"] == "source":
            return KernelSource(
                schedule=schedule,
                text=str(record["text"]),
                entry=str(record["entry"]),
                workspace_bytes=int(cast("int", record["workspace_bytes"])),
                packed_bytes=tuple(cast("Sequence[int]", record["packed_bytes"])),
                replaces_weights=tuple(cast("Sequence[int]", record["replaces_weights"])),
                flags=tuple(cast("Sequence[str]", record["flags"])),
            )
        return LibraryCall(
            schedule=schedule,
            prepare=tuple(_step_from_json(s) for s in cast("Sequence[Json]", record["prepare"])),
            run=tuple(_step_from_json(s) for s in cast("Sequence[Json]", record["run"])),
            outputs=tuple(cast("Ref", _value_from_json(r)) for r in cast("Sequence[Json]", record["outputs"])),
            out_variant=bool(record["out_variant"]),
        )
    except (KeyError, TypeError, ValueError):
        raise _bad("kernel") from None
