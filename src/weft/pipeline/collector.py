"""The interpreter's search for cyclic garbage, put off while a compilation makes objects by the hundred thousand.

Nearly all of them stay until its end, and a look at all objects of a process that has loaded a framework takes a
quarter of a second; without this it happens twice or more while a plan is recalled. Nothing that runs a model belongs
inside: its tensors may wait for that search.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def put_off() -> Iterator[None]:
    """No search inside; at the end one among what was made meanwhile, so that garbage does not pile up.

    Does nothing where the caller has switched the search off. Threads may overlap: the first to leave ends it for all.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect(0)
