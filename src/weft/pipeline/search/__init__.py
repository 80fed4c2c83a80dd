"""Measuring on demand.

prices    what is known of each problem's time, and what the integer program is told of the rest
loop      which problems are measured next, plan by plan, until the best plan is measured throughout
emission  their kernels, as texts
measure   the loop over generators, compilers and the worker, within the budget
"""
