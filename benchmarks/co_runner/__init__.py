"""Persistent co-runners beside whole plans: their work, how they are run and counted, and what a row says."""
