"""A whole training step as one plan: forward, loss, backward and optimizer."""

from __future__ import annotations

from weft.training.step import Step, compile_step

__all__ = ["Step", "compile_step"]
