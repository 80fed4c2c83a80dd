"""The framework's large products, by which a GPU is calibrated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar, final

import torch

from weft.generate.library.execute import plain_math


@final
class Products:
    """The framework's large products, from which `device.cuda.calibrate` learns what FLOP/s are achieved."""

    _TYPES: ClassVar[Mapping[str, torch.dtype]] = {
        "f16": torch.float16,
        "bf16": torch.bfloat16,
        "f32": torch.float32,
        "tf32": torch.float32,
    }

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._made = False

    def __call__(self, dtype: str, n: int) -> Callable[[int], None] | None:
        """What puts an n x n x n product on a stream; None: no such type, or not enough memory."""
        if dtype not in self._TYPES:
            return None
        self._made = True
        try:
            rng = torch.Generator(self._device).manual_seed(0)
            x, y = (torch.randn(n, n, dtype=self._TYPES[dtype], device=self._device, generator=rng) for _ in range(2))
            out = torch.empty_like(x)
        except torch.OutOfMemoryError:
            return None
        torch.cuda.synchronize(self._device)  # the product runs on a stream that does not wait for this one

        def enqueue(stream: int) -> None:
            theirs = torch.cuda.ExternalStream(stream, self._device)  # type: ignore[no-untyped-call]
            with torch.cuda.stream(theirs), plain_math(allow_tf32=dtype == "tf32"):
                torch.mm(x, y, out=out)

        return enqueue

    def close(self) -> None:
        """Give back the memory, if any was taken."""
        if self._made:
            torch.cuda.empty_cache()
