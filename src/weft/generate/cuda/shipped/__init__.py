"""Which kernels were fastest on a GPU that was measured: a table in the package, so that a first choice is good.

A *bucket* is a kind of problem (its key) and a point: rounded binary logarithms of its sizes. In each bucket that was
measured the table has, for every *kind* of schedule that was tried there, how much slower it was than the fastest one.
What is expected of a kind elsewhere is the mean over the buckets with the same key, near ones counting most, drawn
towards the mean of all kinds where little is known. `promoted` puts the schedule that is expected to be the fastest in
front; the others keep the order of the models, and measuring decides.

A table counts for the GPU that it names and for no other. `python -m benchmarks.shipped_table` makes it from the
records of measurements beside it, and shows how good it is for networks that it has not seen.
"""

from __future__ import annotations

from weft.generate.cuda.shipped.buckets import Bucket, base_of, kind_of, loops_bucket, product_bucket
from weft.generate.cuda.shipped.table import MOST_LOOKED_AT, Shipped, measured_best, promoted, table_for

__all__ = [
    "MOST_LOOKED_AT",
    "Bucket",
    "Shipped",
    "base_of",
    "kind_of",
    "loops_bucket",
    "measured_best",
    "product_bucket",
    "promoted",
    "table_for",
]
