"""A call that a stream can be given: blocks that change the order of tokens and heads."""

from __future__ import annotations

import numpy as np
from gpus import GPU, Place, content, numbers, on, some_ids

from kvferry import copy

# [blocks, tokens, heads, dim] of 2-byte items: heads of 256 bytes.
SHAPE = (400, 16, 8, 128)


class Relayout:
    """Some blocks of a token-major tensor for a head-major one of zeros, by ids of its own."""

    def __init__(
        self,
        ends: tuple[Place, Place] = (GPU, GPU),
        shape: tuple[int, int, int, int] = SHAPE,
        seed: int = 1,
    ) -> None:
        blocks, tokens, heads, dim = shape
        self.source = numbers(shape, seed)
        self.ids = some_ids(blocks, 2 * seed), some_ids(blocks, 2 * seed + 1)
        self.from_ = on(ends[0], self.source)
        self.to = on(ends[1], np.zeros((blocks, heads, tokens, dim), np.uint16))

    def copy(self, stream: int | None) -> None:
        copy.copy_blocks(
            self.from_, self.to, *self.ids,
            source_layout="BNHC", target_layout="BHNC", stream=stream,
        )  # fmt: skip

    def expected(self) -> np.ndarray:
        """Return what the target holds after the copy."""
        blocks, tokens, heads, dim = self.source.shape
        target = np.zeros((blocks, heads, tokens, dim), np.uint16)
        target[self.ids[1]] = self.source[self.ids[0]].transpose(0, 2, 1, 3)
        return target

    def is_copied(self) -> bool:
        """Tell whether the target holds that by now; no stream is waited for."""
        return np.array_equal(content(self.to), self.expected())
