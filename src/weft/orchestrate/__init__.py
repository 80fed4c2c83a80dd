"""From a graph of primitives to the cheapest set of kernels: enumerate, extract, estimate, select.

`abstract` and `program` know only sets and numbers; `legality`, `enumerate`, `extract`, `alternatives` and `select`
apply them to `weft.ir` graphs. Costs come in as numbers: nothing here builds or runs a kernel.
"""
