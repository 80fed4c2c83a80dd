"""Another vendor's device, one file for each package that has a part of it, and the one line that makes it known.

It is called `xpu`, as torch calls a kind of device that Weft has none of, and computes on the CPU: what a device is not
needed for is the same as for a real one. Nothing of Weft names it.
"""

from __future__ import annotations

from weft.device.kinds import Kind

HERE = "tests.platform.vendor"
XPU = Kind(
    facts=f"{HERE}.facts:XpuFacts",
    platform=f"{HERE}.platform:Xpu",
    generator=f"{HERE}.generator:XpuGenerator",
    estimate=f"{HERE}.estimate:estimate_us",
    bound=f"{HERE}.estimate:lower_bound_us",
    site=f"{HERE}.site:site",
    worker=f"{HERE}.site:worker",
    saved=f"{HERE}.executable:saved",
)
"""The line."""
