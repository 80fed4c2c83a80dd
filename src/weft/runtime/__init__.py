"""Runs plans: memory, launches, saving and loading. Works without the packages that make plans."""
