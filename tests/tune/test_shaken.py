"""The form of a kernel that is shaken: which copies it may put off, and who stays behind; texts alone, no GPU."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest
from tests import goldens
from tests.generate.cuda.test_goldens import made

from weft.device.cuda.nvrtc import find_nvrtc
from weft.ir.declined import Declined
from weft.kernels.source import CudaSource, Schedule
from weft.tune.cuda_shaken import header_lines, shaken

TEXTS = {p.stem: p.read_text(encoding="utf-8") for p in sorted((goldens.FOLDER / "cuda" / "templates").glob("*.cu"))}
WAIT = re.compile(r"(?<!void )\bw_arrived<[^;]+?>\(\)")
"""For copies, in a kernel's own text."""
QUEUE = " w_late w_q;"
KERNEL = 'extern "C" __global__ void k(float* x) {\n__shared__ float held[32];\n'
HELPER = "W_FN void fill(u32 to, const void* from) {\nw_copy16(to, from); w_commit();\n"


def late(text: str) -> str:
    form = shaken(CudaSource(Schedule("cuda", ()), text, ()))
    assert form is not None
    return form.source.text


@cache
def source(name: str) -> CudaSource:
    """The kernel of a golden text, as it is built."""
    place, schedule = (line.removeprefix("// ") for line in TEXTS[name].split("\n")[:2])
    found = made(place, json.loads(schedule))
    assert isinstance(found, CudaSource)
    return found


COPYING = [name for name, text in TEXTS.items() if "w_copy16(" in text]
READY = [name for name, text in TEXTS.items() if "w_bar_init(" in text]
IN_HEADERS = {"training", "training_layered"}
"""Templates with functions in headers that wait for copies."""


def test_there_are_templates_of_both_kinds() -> None:
    assert {"mma", "separable", "mlp", "mlp_pair", "training", "grouped"} <= set(COPYING)
    assert {"tma", "swap_ab", "attention_tma", "mlp_pair", "grouped_tma"} <= set(READY)


@pytest.mark.parametrize("name", [name for name in COPYING if name not in IN_HEADERS])
def test_whichever_wait_a_kernel_has_lost_its_copies_are_put_off(name: str) -> None:
    """Without the only one nothing was put off, and copies came in time by chance (`separable workspace`)."""
    lines = source(name).text.split("\n")
    assert QUEUE in late("\n".join(lines))
    waiting = [k for k, line in enumerate(lines) if line not in header_lines() and WAIT.search(line)]
    assert waiting
    for k in waiting:
        found = late("\n".join([*lines[:k], WAIT.sub("(void)0", lines[k]), *lines[k + 1 :]]))
        assert QUEUE in found
        mine = [line for line in found.split("\n")[-len(lines) :] if line not in header_lines()]
        assert not any(re.search(r"\bw_copy16\(", line) for line in mine)


def test_what_a_helper_copies_is_not_put_off_where_its_caller_waits() -> None:
    calls = KERNEL + "fill(0, x); w_arrived<0>(); __syncthreads();\n}"
    both = KERNEL + "w_copy16(16, x); fill(0, x); w_arrived<0>(); __syncthreads();\n}"
    for text in (calls, both):
        found = late(f"{HELPER}}}\n{text}")
        assert QUEUE not in found and "w_copy16_late(to" not in found


def test_what_a_kernel_copies_is_not_put_off_where_a_helper_waits() -> None:
    waiting = "W_FN void ready() {\nw_arrived<0>(); __syncthreads();\n}\n"
    assert QUEUE not in late(waiting + KERNEL + "w_copy16(0, x); w_commit(); ready();\n}")


def test_what_a_kernel_copies_is_not_put_off_where_a_header_or_a_macro_may_wait() -> None:
    waiting = next(line for line in sorted(header_lines()) if WAIT.search(line) and "STAGES" in line)
    copying = KERNEL + "w_copy16(0, x); w_commit(); READY;\n}"
    assert QUEUE not in late(f"{waiting}\n{copying}")
    assert QUEUE not in late(f"#define READY w_arrived<0>()\n{copying}")


def test_a_helper_s_copies_are_put_off_where_it_waits_itself_or_nobody_does() -> None:
    calls = KERNEL + "fill(0, x); __syncthreads();\n}"
    assert f"fill(u32 to, const void* from) {{{QUEUE}" in late(f"{HELPER}w_arrived<0>();\n}}\n{calls}")
    assert f"fill(u32 to, const void* from) {{{QUEUE}" in late(f"{HELPER}}}\n{calls}")


@pytest.mark.parametrize("name", READY)
def test_who_makes_barriers_ready_stays_behind_all_others(name: str) -> None:
    """A block-wide barrier behind it was missed in no run: the others waited for the kernel before (`tma odd rows`)."""
    found = late(source(name).text)
    behind = re.findall(r"if \(t == 0\) \{ w_lag\(\);(.*)", found)
    assert len(behind) == found.count(" w_lag();") == 1
    assert "w_bar_init(" in behind[0]


def test_barriers_made_ready_on_lines_of_their_own_are_found() -> None:
    body = "if (x != nullptr) {\nx[0] = 1;\n}\nif (role.thread() == 0) {\nfor (int i = 0; i < 4; ++i) {\n"
    found = late(f"{KERNEL}{body}w_bar_init(8 * i, 1);\n}}\nw_bar_ready();\n}}\nrole.sync();\nif (x) {{\n}}\n}}")
    assert re.findall(r".*w_lag\(\);.*", found) == ["if (role.thread() == 0) { w_lag();"]


def test_kernels_without_such_barriers_have_nobody_who_stays_behind() -> None:
    assert " w_lag();" not in late(source("mma").text)


@pytest.mark.parametrize("name", ["tma", "attention_tma", "mlp_pair", "separable"])
def test_the_form_compiles(name: str, tmp_path: Path) -> None:
    nvrtc = find_nvrtc()
    if isinstance(nvrtc, Declined):
        pytest.skip(nvrtc.reason)
    form = shaken(source(name))
    assert form is not None and (" w_lag();" in form.source.text) == (name in READY)
    done = nvrtc.compile(form.source.text, arch="sm_90a", flags=form.source.flags, cache_dir=tmp_path)
    assert {x.entry for x in source(name).launches} <= dict(done.resources).keys()
