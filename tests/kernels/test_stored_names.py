"""What was stored under a schedule's earlier names is found under those of today: rows, plans, names of entries.

`stored_schedules.json` was written by an earlier version: of every template a schedule for all fields that there were,
with the name of its kernel's entry for the problem `a problem`, and rows of a database.
"""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from weft.generate.cuda.attention import shapes as attention_shapes
from weft.generate.cuda.attention import tma_shapes as attention_tma
from weft.generate.cuda.conv.depthwise import kernel as depthwise
from weft.generate.cuda.conv.halo import kernel as halo
from weft.generate.cuda.conv.pooled import kernel as pooled
from weft.generate.cuda.conv.separable import kernel as separable
from weft.generate.cuda.conv.stacked import kernel as stacked
from weft.generate.cuda.gemm.gemv import kernel as gemv
from weft.generate.cuda.gemm.grouped import kernel as grouped
from weft.generate.cuda.gemm.grouped import tma as grouped_tma
from weft.generate.cuda.gemm.mma import kernel as mma
from weft.generate.cuda.gemm.swap_ab import kernel as swap_ab
from weft.generate.cuda.gemm.tma import shape as tma
from weft.generate.cuda.loops.forms import Form
from weft.generate.cuda.mlp import pair as mlp_pair
from weft.generate.cuda.mlp import shapes as mlp
from weft.generate.cuda.mlp import wide as mlp_wide
from weft.generate.cuda.shipped.buckets import kind_of
from weft.kernels.codec import kernel_from_json, kernel_to_json, schedule_from_json, schedule_to_json
from weft.kernels.source import Schedule
from weft.kernels.stored_names import (
    FIELDS,
    TEMPLATES,
    as_called,
    as_stored,
    entry_name,
    kind_as_called,
    text_as_called,
)
from weft.tune.store import Row, read_row

STORED = json.loads((Path(__file__).parent / "stored_schedules.json").read_text(encoding="utf-8"))
CLASSES: dict[str, Any] = {
    "": Form,
    "attention": attention_shapes.AttentionConfig,
    "attention_tf32": attention_shapes.AttentionConfig,
    "attention_split": attention_shapes.SplitAttentionConfig,
    "attention_tma": attention_tma.AttentionTmaConfig,
    "depthwise": depthwise.DepthwiseConfig,
    "gemv": gemv.GemvConfig,
    "grouped": grouped.GroupedConfig,
    "grouped_simt": grouped.GroupedConfig,
    "grouped_tma": grouped_tma.GroupedTmaConfig,
    "halo": halo.HaloConfig,
    "mlp": mlp.MlpConfig,
    "mlp_pair": mlp_pair.MlpPairConfig,
    "mlp_wide": mlp_wide.MlpWideConfig,
    "mma": mma.MmaConfig,
    "pooled": pooled.PooledConfig,
    "separable": separable.SeparableConfig,
    "stacked": stacked.StackedConfig,
    "swap_ab": swap_ab.SwapAbConfig,
    "tma": tma.TmaConfig,
    "wgmma": mma.MmaConfig,
}
"""What reads the schedules of a template back."""
PLAIN = {"linear_attention"}
"""Templates whose schedules are read field by field."""


def template(schedule: Schedule) -> str:
    return str(dict(schedule.params).get("template", ""))


@pytest.mark.parametrize(
    "stored", STORED["schedules"], ids=lambda x: str(dict(x["schedule"]["params"]).get("template"))
)
def test_a_schedule_is_stored_as_it_was(stored: Any) -> None:
    schedule = schedule_from_json(stored["schedule"])
    assert json.loads(json.dumps(schedule_to_json(schedule))) == stored["schedule"]
    assert entry_name("a problem", schedule) == stored["entry"], "texts of kernels are what measurements are kept under"
    assert as_called(as_stored(schedule)) == as_called(schedule) == schedule
    today = {"generator": schedule.generator, "params": [list(x) for x in schedule.params]}
    assert schedule_from_json(json.loads(json.dumps(today))) == schedule, "names of today are read, too"


@pytest.mark.parametrize(
    "stored", STORED["schedules"], ids=lambda x: str(dict(x["schedule"]["params"]).get("template"))
)
def test_a_template_reads_all_that_was_stored(stored: Any) -> None:
    schedule = schedule_from_json(stored["schedule"])
    name = template(schedule)
    if name in PLAIN:
        return
    read = CLASSES[name].of(schedule)
    if name == "grouped_tma":
        assert read.schedule() == schedule
        return
    own = {f.name for f in fields(read)}
    told = {k: v for k, v in schedule.params if k != "template"}
    assert told.keys() <= own, "a field that nobody reads"
    assert {k: getattr(read, k) for k in told} == told


def test_every_template_and_every_renamed_field_was_stored() -> None:
    """So the table of names holds nothing that this file does not ask for."""
    seen: dict[str, set[str]] = {}
    for stored in STORED["schedules"]:
        schedule = schedule_from_json(stored["schedule"])
        seen.setdefault(template(schedule), set()).update(k for k, _ in schedule.params)
    assert seen.keys() >= CLASSES.keys()
    seen["grouped_tma"] |= seen["tma"]  # a member has all fields of `tma`
    for name, names in FIELDS.items():
        assert names.keys() <= seen[name], name
        assert len(set(names.values())) == len(names), f"{name}: two fields with one stored name"
        kept = seen[name] - names.keys()
        assert not kept & set(names.values()), f"{name}: a field has the name under which another is stored"
    assert not set(TEMPLATES) & set(TEMPLATES.values())


@pytest.mark.parametrize("row", STORED["rows"], ids=lambda x: x["key"][:8])
def test_a_row_is_found_again(row: Any) -> None:
    record = read_row(Row(**row))
    assert record is not None, "a row that does not verify is thrown away"
    schedule = record.measurement.schedule
    assert as_called(schedule) == schedule
    assert record.to_row("a trial") == Row(**row), "written again it is the same"


def test_a_kernel_of_a_plan_keeps_its_schedule() -> None:
    for stored in STORED["schedules"]:
        record = {"kind": "call", "schedule": stored["schedule"], "prepare": [], "run": [], "outputs": [],
                  "out_variant": False}  # fmt: skip
        kernel = kernel_from_json(record)
        assert kernel.schedule == schedule_from_json(stored["schedule"])
        assert json.loads(json.dumps(kernel_to_json(kernel))) == record


def test_kinds_of_shipped_tables_are_those_of_today() -> None:
    """A table from before names fields as they were stored."""
    changed = 0
    for stored in STORED["schedules"]:
        schedule = schedule_from_json(stored["schedule"])
        kind = kind_of(schedule)
        back = FIELDS.get(template(schedule), {})
        words = [TEMPLATES.get(word, word) for word in kind.split(" ")]
        old = " ".join(
            back.get(w.partition("=")[0], w.partition("=")[0]) + "".join(w.partition("=")[1:]) for w in words
        )
        assert kind_as_called(old) == kind
        changed += old != kind
    assert changed


def test_records_that_print_schedules_are_read() -> None:
    for stored in STORED["schedules"]:
        params = tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in stored["schedule"]["params"])
        assert text_as_called(str(Schedule("cuda", params))) == str(schedule_from_json(stored["schedule"]))
    assert text_as_called("cuda(template=simt)") == "cuda(template=simt)"
    assert text_as_called("cublasLt 42") == "cublasLt 42"


def test_schedules_of_other_generators_are_left_alone() -> None:
    other = Schedule("mine", (("template", "tma"), ("turns", True)))
    assert as_called(other) is other
    assert as_stored(other) is other
