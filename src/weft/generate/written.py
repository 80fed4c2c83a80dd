"""In which files of Weft the text of a kernel is written: where to look for a line of it, by its schedule alone.

For readers of plans (`weft explain`, the report), who have schedules as text, of any age. The first file of a row makes
the roles, or the C function; what stands beside it in its folder writes parts of them. Headers, with whose text kernels
begin, stand in `generate/cuda/intrinsics` and in a template's folder; kernels that repack weights are written in
`gemm/common/pack.py`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from weft.generate.cuda.table import NAMED

FILES: Mapping[tuple[str, str], tuple[str, ...]] = MappingProxyType(
    {
        ("cpp", ""): ("cpp/kernel.py",),
        ("cpp", "contraction"): ("cpp/templates/direct.py",),
        ("cpp", "depthwise"): ("cpp/templates/depthwise.py",),
        ("cpp", "winograd"): ("cpp/templates/winograd.py",),
        **{("cuda", name): t.files(name) for name, t in NAMED.items()},
        ("cuda", ""): ("cuda/loops/kernel.py",),
        ("cuda", "pools"): ("cuda/loops/pools.py",),
    }
)
"""By generator and template, none for fused loops: files below `weft/generate`."""
_SCHEDULE = re.compile(r"(\w+)\((.*)\)")
_TEMPLATE = re.compile(r"(?:^|,)template=(\w+)(?:,|$)")


def written_in(schedule: str) -> tuple[str, ...]:
    """Files that wrote the kernel of a schedule (as text, `str(Schedule)`); none of a library's call or a plug-in's."""
    told = _SCHEDULE.fullmatch(schedule)
    if told is None:
        return ()
    template = _TEMPLATE.search(told[2])
    return tuple(f"weft/generate/{f}" for f in FILES.get((told[1], template[1] if template else ""), ()))
