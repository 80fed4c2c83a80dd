"""Measuring on demand; docs/architecture.md follows a candidate through these files.

loop      `Search`: what is measured next, plan by plan, until the best plan is measured throughout; it owns its state
prices    what is known of each problem's time, and what the integer program is told of the rest
kernels   how many kernels of a task are asked for, and which of them are measured
emission  the generators' texts, written by several processes
measure   a search on a bench: orders become trials, within the budget
"""
