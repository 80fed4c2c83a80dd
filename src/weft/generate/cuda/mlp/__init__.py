"""Chains of fully connected layers as one kernel."""
