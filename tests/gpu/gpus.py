"""The GPUs of these tests: why there are none, and memory of them and of the host for torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from kvferry import cuda

# Types of torch by the bytes of their items; what they mean is nobody's business here.
TYPES = {1: torch.uint8, 2: torch.bfloat16, 4: torch.float32, 8: torch.float64}


def _reason() -> str | None:
    return cuda.unavailable_reason() or (
        None if torch.cuda.is_available() else "this torch has no CUDA"
    )


on_gpu = [pytest.mark.gpu, pytest.mark.skipif(_reason() is not None, reason=str(_reason()))]


@dataclass(frozen=True)
class OnItsDevice:
    """A tensor that speaks DLPack whichever device is current; torch's do only on the current."""

    tensor: torch.Tensor

    def __dlpack_device__(self) -> Any:
        return self.tensor.__dlpack_device__()

    def __dlpack__(self, **options: Any) -> Any:
        with torch.cuda.device(self.tensor.device):
            return self.tensor.__dlpack__(**options)


class Place:
    """Memory of one GPU, or pinned memory of the host (`None`)."""

    def __init__(self, ordinal: int | None) -> None:
        self._ordinal = ordinal

    def __repr__(self) -> str:
        return "pinned memory" if self._ordinal is None else f"cuda:{self._ordinal}"

    def hold(self, content: np.ndarray) -> torch.Tensor:
        held = torch.from_numpy(content)
        held = held.pin_memory() if self._ordinal is None else held.to(repr(self))
        torch.cuda.synchronize(self._ordinal)  # streams of torch do not wait for the default one
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
    ) -> Any:
        items = memory.view(TYPES[item_bytes])
        tensor = items.as_strided(tuple(shape), tuple(strides), offset_bytes // item_bytes)
        return OnItsDevice(tensor) if self._ordinal else tensor


GPU, PINNED = Place(0), Place(None)
# All that one stream of the GPU can copy between.
ENDS = [(GPU, GPU), (PINNED, GPU), (GPU, PINNED)]
BY_ENDS = pytest.mark.parametrize("ends", ENDS, ids=str)


def numbers(shape: Sequence[int], seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 1 << 16, shape, np.uint16)


def some_ids(count: int, seed: int) -> np.ndarray:
    """Return two thirds of the ids, in any order."""
    return np.random.default_rng(seed).permutation(count)[: max(1, 2 * count // 3)]


def on(place: Place, array: np.ndarray) -> torch.Tensor:
    """Return a dense copy there, as 2-byte integers that can be compared."""
    return place.hold(array.view(np.uint8).ravel()).view(torch.int16).view(array.shape)


def content(tensor: torch.Tensor) -> np.ndarray:
    """Return what a tensor of `on` holds now, without waiting for any stream of torch."""
    return tensor.cpu().numpy().view(np.uint16)


def back(tensor: torch.Tensor) -> np.ndarray:
    """Return what a tensor of `on` holds once everything has run."""
    torch.cuda.synchronize()
    return content(tensor)
