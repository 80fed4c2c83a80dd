"""The machine: facts about it, its compilers, and a thin way to call compiled kernels.

Takes text and flags, returns bytes and a log; knows neither graphs nor kernels' contracts.
"""
