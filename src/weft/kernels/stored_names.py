"""Names of schedules as they are stored, and as they are called.

Measurements, plans and names of kernels hold schedules, so what a field was called when it was first measured is what
it is called there for good: its *stored name*. A field that gets a better name keeps it, and gets a line here. Reading
(`codec.schedule_from_json`) takes either name; writing, keys of measurements and the names of kernels' entries take the
stored one, so that nothing that was measured before is measured again.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping

from weft.kernels.source import Schedule, ScheduleParam

GENERATOR = "cuda"
TEMPLATES: Mapping[str, str] = {"swap_ab": "swap"}
"""Stored name of a template, by its name."""
_GRID = {"persistent_ctas": "blocks"}
_CONSUMERS = {**_GRID, "consumers": "groups", "min_ctas": "resident", "pingpong": "turns"}
_TMA = {
    **_CONSUMERS, "stream_k": "even", "coop_fixup": "mutual", "multicast": "pair", "raster_group": "band",
    "two_level": "apart", "interleaved": "woven", "overfetch": "spare", "halo_stages": "fields",
    "taps_per_stage": "unit",
}  # fmt: skip
FIELDS: Mapping[str, Mapping[str, str]] = {
    "": {
        "single_pass": "once",
        "cross_cta": "meet",
        "scatter": "outward",
        "smem_stash": "room",
        "num_splits": "parts",
    },
    "tma": _TMA,
    "grouped_tma": _TMA,
    "attention_tma": {**_CONSUMERS, "split_keys": "keyed"},
    "swap_ab": {"multicast": "pair"},
    "mlp": {**_GRID, "min_ctas": "resident", "pingpong": "turns"},
    "mlp_wide": _GRID,
    "mlp_pair": _GRID,
}
"""Stored names of fields, by template and name; the template without a name is that of fused loops."""
_PARAMETER = re.compile(r"(\w+)=(\([^)]*\)|[^,)]+)")
_BACK: Mapping[str, Mapping[str, str]] = {
    template: {old: new for new, old in names.items()} for template, names in FIELDS.items()
}
_CALLED: Mapping[str, str] = {old: new for new, old in TEMPLATES.items()}


def as_stored(schedule: Schedule) -> Schedule:
    """The schedule as databases and plans have it."""
    template = _template(schedule)
    return _renamed(schedule, FIELDS.get(_CALLED.get(template, template), {}), TEMPLATES)


def as_called(schedule: Schedule) -> Schedule:
    """Inverse of `as_stored`; a schedule with the names of today is the same afterwards."""
    template = _template(schedule)
    return _renamed(schedule, _BACK.get(_CALLED.get(template, template), {}), _CALLED)


def entry_name(problem_key: str, schedule: Schedule, part: str = "") -> str:
    """The name of a kernel's entry in its text, by which texts of today are those of earlier versions."""
    told = f"{problem_key}|{as_stored(schedule)}" + (f"|{part}" if part else "")
    return f"k{hashlib.sha256(told.encode()).hexdigest()[:16]}"


def kind_as_called(kind: str) -> str:
    """The same of a kind of schedule: a template, and its fields as `name=value`."""
    template, _, rest = kind.partition(" ")
    called = _CALLED.get(template, template)
    names = _BACK.get(called if called != "loops" else "", {})
    words = (name.partition("=") for name in rest.split(" ")) if rest else ()
    return " ".join([called, *(names.get(name, name) + is_ + value for name, is_, value in words)])


def text_as_called(text: str) -> str:
    """The same of what `str` makes of a schedule, as in records of measurements."""
    generator, _, rest = text.partition("(")
    params = [(str(m[1]), str(m[2])) for m in _PARAMETER.finditer(rest)]
    called = as_called(Schedule(generator, tuple(params)))
    return str(called) if params and text.endswith(")") else text


def _template(schedule: Schedule) -> str:
    return next((str(value) for name, value in schedule.params if name == "template"), "")


def _renamed(schedule: Schedule, names: Mapping[str, str], templates: Mapping[str, str]) -> Schedule:
    if schedule.generator != GENERATOR or not (names or templates):
        return schedule

    def told(name: str, value: ScheduleParam) -> tuple[str, ScheduleParam]:
        return names.get(name, name), templates.get(str(value), value) if name == "template" else value

    params = tuple(told(*x) for x in schedule.params)
    return schedule if params == schedule.params else Schedule(GENERATOR, tuple(sorted(params, key=lambda x: x[0])))
