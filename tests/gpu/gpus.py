"""The GPU of these tests: why there is none, and memory of it and of the host for torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kvferry import cuda

DEVICE = "cuda"
# Types of torch by the bytes of their items; what they mean is nobody's business here.
TYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def _reason() -> str | None:
    return cuda.unavailable_reason() or (
        None if torch.cuda.is_available() else "this torch has no CUDA"
    )


on_gpu = [pytest.mark.gpu, pytest.mark.skipif(_reason() is not None, reason=str(_reason()))]


class Place:
    """Memory of the first GPU, or pinned memory of the host."""

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned

    def __repr__(self) -> str:
        return "pinned memory" if self._pinned else "GPU"

    def hold(self, content: np.ndarray) -> torch.Tensor:
        held = torch.from_numpy(content)
        held = held.pin_memory() if self._pinned else held.to(DEVICE)
        torch.cuda.synchronize()  # streams of their own do not wait for the default one
        return held

    def read(self, memory: torch.Tensor) -> np.ndarray:
        return memory.cpu().numpy()

    def tensor(
        self,
        memory: torch.Tensor,
        offset_bytes: int,
        shape: Sequence[int],
        strides: Sequence[int],
        item_bytes: int,
    ) -> torch.Tensor:
        items = memory.view(TYPES[item_bytes])
        return items.as_strided(tuple(shape), tuple(strides), offset_bytes // item_bytes)


GPU, PINNED = Place(), Place(pinned=True)
# All that one stream of the GPU can copy between.
ENDS = [(GPU, GPU), (PINNED, GPU), (GPU, PINNED)]


def numbers(shape: Sequence[int], seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 16, shape, np.uint16)


def on(place: Place, array: np.ndarray) -> torch.Tensor:
    """Return a dense copy there, as 2-byte integers that can be compared."""
    return place.hold(array.view(np.uint8).ravel()).view(torch.int16).view(array.shape)


def back(tensor: torch.Tensor) -> np.ndarray:
    """Return what a tensor of `on` holds once everything has run."""
    torch.cuda.synchronize()
    return tensor.cpu().numpy().view(np.uint16)
