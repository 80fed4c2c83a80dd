"""Kernels and schedules as JSON values and back: for plans, the database and the workers. No pickle."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import cast

from weft.errors import ArtifactError
from weft.kernels.source import (
    CallStep,
    CallValue,
    CudaArgument,
    CudaSource,
    Inside,
    Kernel,
    KernelSource,
    Launch,
    Left,
    LibraryCall,
    Number,
    Pointer,
    Ref,
    Schedule,
    ScheduleParam,
    TensorMap,
)
from weft.kernels.stored_names import as_called, as_stored

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]


def _bad(what: str) -> ArtifactError:
    return ArtifactError(problem=f"malformed {what}", remedy="make the artifact again with this version of Weft")


def schedule_to_json(schedule: Schedule) -> Json:
    """`{"generator": ..., "params": [[name, value], ...]}` by stored names; tuples become lists."""
    params = [[k, list(v) if isinstance(v, tuple) else v] for k, v in as_stored(schedule).params]
    return {"generator": schedule.generator, "params": params}


def schedule_from_json(data: Json) -> Schedule:
    """Inverse of `schedule_to_json`; names of today are read, too.

    Raises:
        ArtifactError: not such a value [W401].
    """
    try:
        record = cast("Mapping[str, Json]", data)
        params = []
        for pair in cast("Sequence[Sequence[Json]]", record["params"]):
            name, value = pair
            params.append((str(name), tuple(value) if isinstance(value, list) else value))
        found = cast("tuple[tuple[str, ScheduleParam], ...]", tuple(params))
        return as_called(Schedule(str(record["generator"]), found))
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


def _argument_to_json(argument: CudaArgument) -> Json:
    if isinstance(argument, Pointer):
        return {"pointer": argument.kind, "index": argument.index}
    if isinstance(argument, Inside):
        return {"inside": _argument_to_json(argument.base), "bytes": argument.bytes}
    if isinstance(argument, Number):
        return {"number": argument.value}
    return {
        "map": _argument_to_json(argument.base),
        "dtype": argument.dtype,
        "sizes": list(argument.sizes),
        "strides_bytes": list(argument.strides_bytes),
        "box": list(argument.box),
        "element_strides": list(argument.element_strides),
        "swizzle_bytes": argument.swizzle_bytes,
    }


def _ints(data: Json) -> tuple[int, ...]:
    return tuple(int(x) for x in cast("Sequence[int]", data))


def _argument_from_json(data: Json) -> CudaArgument:
    record = cast("Mapping[str, Json]", data)
    if "pointer" in record:
        return Pointer(str(record["pointer"]), int(cast("int", record["index"])))
    if "number" in record:
        return Number(int(cast("int", record["number"])))
    base = _argument_from_json(record["inside" if "inside" in record else "map"])
    if not isinstance(base, Pointer):
        raise TypeError("an argument of an argument that is no pointer")
    if "inside" in record:
        return Inside(base, int(cast("int", record["bytes"])))
    return TensorMap(
        base,
        str(record["dtype"]),
        _ints(record["sizes"]),
        _ints(record["strides_bytes"]),
        _ints(record["box"]),
        _ints(record["element_strides"]),
        int(cast("int", record["swizzle_bytes"])),
    )


def _launch_to_json(launch: Launch) -> Json:
    return {
        "entry": launch.entry,
        "grid": list(launch.grid),
        "block": list(launch.block),
        "arguments": [_argument_to_json(x) for x in launch.arguments],
        "shared_bytes": launch.shared_bytes,
        "cluster": list(launch.cluster),
        "dependent": launch.dependent,
        **({"at_once": launch.co_resident} if launch.co_resident > 1 else {}),
    }


def _launch_from_json(data: Json) -> Launch:
    record = cast("Mapping[str, Json]", data)
    grid, block, cluster = (_ints(record[name]) for name in ("grid", "block", "cluster"))
    if not len(grid) == len(block) == len(cluster) == 3:
        raise ValueError("three dimensions")
    return Launch(
        entry=str(record["entry"]),
        grid=(grid[0], grid[1], grid[2]),
        block=(block[0], block[1], block[2]),
        arguments=tuple(_argument_from_json(x) for x in cast("Sequence[Json]", record["arguments"])),
        shared_bytes=int(cast("int", record["shared_bytes"])),
        cluster=(cluster[0], cluster[1], cluster[2]),
        dependent=bool(record["dependent"]),
        co_resident=int(cast("int", record.get("at_once", 1))),
    )


def _cuda_to_json(kernel: CudaSource) -> Json:
    return {
        "kind": "cuda",
        "schedule": schedule_to_json(kernel.schedule),
        "text": kernel.text,
        "launches": [_launch_to_json(x) for x in kernel.launches],
        "pack": [_launch_to_json(x) for x in kernel.pack],
        "workspace_bytes": kernel.workspace_bytes,
        "state_bytes": kernel.state_bytes,
        "packed_bytes": list(kernel.packed_bytes),
        "replaces_weights": list(kernel.replaces_weights),
        "capability": kernel.capability,
        "exact_arch": kernel.exact_arch,
        "flags": list(kernel.flags),
        "max_registers": kernel.max_registers,
        "transforms": kernel.transforms,
        **({"left": [_left_to_json(x) for x in kernel.left]} if kernel.left else {}),
        **({"input_output_aliases": [list(x) for x in aliases]} if (aliases := kernel.input_output_aliases) else {}),
    }


def _cuda_from_json(record: Mapping[str, Json]) -> CudaSource:
    return CudaSource(
        schedule=schedule_from_json(record["schedule"]),
        text=str(record["text"]),
        launches=tuple(_launch_from_json(x) for x in cast("Sequence[Json]", record["launches"])),
        pack=tuple(_launch_from_json(x) for x in cast("Sequence[Json]", record["pack"])),
        workspace_bytes=int(cast("int", record["workspace_bytes"])),
        state_bytes=int(cast("int", record["state_bytes"])),
        packed_bytes=_ints(record["packed_bytes"]),
        replaces_weights=_ints(record["replaces_weights"]),
        capability=int(cast("int", record["capability"])),
        exact_arch=bool(record["exact_arch"]),
        flags=tuple(cast("Sequence[str]", record["flags"])),
        max_registers=int(cast("int", record["max_registers"])),
        transforms=bool(record["transforms"]),
        left=tuple(_left_from_json(x) for x in cast("Sequence[Json]", record.get("left", ()))),
        input_output_aliases=tuple(_pair(x) for x in cast("Sequence[Json]", record.get("input_output_aliases", ()))),
    )


def _pair(data: Json) -> tuple[int, int]:
    first, second = _ints(data)
    return first, second


def _left_to_json(left: Left) -> Json:
    return [left.output, left.offset, list(left.strides), left.terms, left.step]


def _left_from_json(data: Json) -> Left:
    output, offset, strides, terms, step = cast("Sequence[Json]", data)
    numbers = _ints([output, offset, terms, step])
    return Left(numbers[0], numbers[1], _ints(strides), numbers[2], numbers[3])


def kernel_to_json(kernel: Kernel) -> Json:
    """A tagged record: `{"kind": "source" | "cuda" | "call", ...}`."""
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
    if isinstance(kernel, CudaSource):
        return _cuda_to_json(kernel)
    return {
        "kind": "call",
        "schedule": schedule_to_json(kernel.schedule),
        "prepare": [_step_to_json(s) for s in kernel.prepare],
        "run": [_step_to_json(s) for s in kernel.run],
        "outputs": [_value_to_json(r) for r in kernel.outputs],
        "out_variant": kernel.out_variant,
    }


def kernel_sha256(kernel: Kernel) -> str:
    """Identity of everything about a kernel but its schedule: two generators that wrote the same have the same."""
    return _digest(kernel, {"schedule"})


def code_sha256(kernel: CudaSource, entries: Mapping[str, str]) -> str:
    """Identity of what a GPU runs of a kernel: its machine code, its launches and the memory that it is given.

    Equal for kernels whose texts differ in words, names and options alone.

    Args:
        kernel: the source.
        entries: the digest of each entry's machine code, see `weft.device.cuda.cubin.entries`.

    Raises:
        KeyError: one of its entries is not among these.
    """
    coded = replace(
        kernel,
        launches=tuple(replace(x, entry=entries[x.entry]) for x in kernel.launches),
        pack=tuple(replace(x, entry=entries[x.entry]) for x in kernel.pack),
    )
    return _digest(coded, {"schedule", "text", "flags", "max_registers", "capability", "exact_arch"})


def _digest(kernel: Kernel, without: Collection[str]) -> str:
    content = {k: v for k, v in cast("Mapping[str, Json]", kernel_to_json(kernel)).items() if k not in without}
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


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
        if record["kind"] == "cuda":
            return _cuda_from_json(record)
        return LibraryCall(
            schedule=schedule,
            prepare=tuple(_step_from_json(s) for s in cast("Sequence[Json]", record["prepare"])),
            run=tuple(_step_from_json(s) for s in cast("Sequence[Json]", record["run"])),
            outputs=tuple(cast("Ref", _value_from_json(r)) for r in cast("Sequence[Json]", record["outputs"])),
            out_variant=bool(record["out_variant"]),
        )
    except (KeyError, TypeError, ValueError):
        raise _bad("kernel") from None
