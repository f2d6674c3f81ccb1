"""What the functions of `kvferry.copy` have to do, by coordinates, and memory of any strides.

Nothing here comes from kvferry: a layout is its letters, an element is found by its index.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

ITEM_TYPES: dict[int, Any] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclass
class Strided:
    """An array inside a larger memory, so that a write beside its elements shows."""

    memory: np.ndarray  # [items], from before the array's first element to after its last
    array: np.ndarray  # a view, of any strides
    begin: int  # item at which the array begins

    def tensor(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the array's elements as a torch tensor over the same memory."""
        item_bytes = self.memory.itemsize
        strides = [stride // item_bytes for stride in self.array.strides]
        # Of the unsigned types every torch has, there is only the byte.
        plain = torch.from_numpy(self.memory.view(np.uint8)).view(dtype)
        assert plain.element_size() == item_bytes
        return plain.as_strided(self.array.shape, strides, self.begin)


def strided(
    shape: Sequence[int],
    memory_order: Sequence[int] | None = None,
    *,
    item_bytes: int = 2,
    innermost_step: int = 1,
    padding: Sequence[int] | None = None,
    margin: int = 3,
    seed: int = 0,
) -> Strided:
    """Lay an array out over random bytes.

    `memory_order` names the dimensions outermost first, `innermost_step` is the stride of the last
    of them, and `padding[i]` is how many items lie unused behind each step along dimension `i`.
    """
    order = range(len(shape)) if memory_order is None else memory_order
    padding = [0] * len(shape) if padding is None else padding
    strides, extent = [0] * len(shape), innermost_step
    for axis in reversed(order):
        strides[axis] = extent + (0 if axis == order[-1] else padding[axis])
        extent = strides[axis] * shape[axis]
    item = ITEM_TYPES[item_bytes]
    random_bytes = np.random.default_rng(seed).bytes((extent + 2 * margin) * item_bytes)
    memory = np.frombuffer(bytearray(random_bytes), item)
    array = np.lib.stride_tricks.as_strided(
        memory[margin:], shape, [stride * item_bytes for stride in strides]
    )
    return Strided(memory, array, margin)


@contextmanager
def refused(error: Any, *memories: np.ndarray, match: str | None = None) -> Iterator[None]:
    """Expect an error, and that none of these memories has changed."""
    before = [memory.copy() for memory in memories]
    with pytest.raises(error, match=match) as caught:
        yield
    assert str(caught.value)
    for memory, unchanged in zip(memories, before, strict=True):
        np.testing.assert_array_equal(memory, unchanged)


# -- the post-process functions ------------------------------------------------------------------


def repaired_plane(plane: np.ndarray, ratio: int, *, read_token_major: bool) -> np.ndarray:
    """Return what a plane [N, H, D] becomes when its elements really are [ratio][H][N/ratio][D].

    They are read in the order (t, h, d) where `read_token_major`, else (h, t, d).
    """
    tokens, heads, _ = plane.shape
    i, h, t = np.indices((ratio, heads, tokens // ratio))
    # Vectors of D elements that come before this one in the order of reading.
    place = (i * heads + h) * (tokens // ratio) + t
    if read_token_major:
        read_t, read_h = np.divmod(place, heads)
    else:
        read_h, read_t = np.divmod(place, tokens)
    result = np.empty_like(plane)
    result[i * (tokens // ratio) + t, h] = plane[read_t, read_h]
    return result


def repair_by_hand(name: str, cache: np.ndarray, rows: Sequence[int], ratio: int = 1) -> None:
    """Do to `cache` [blocks, N, H, D] or [blocks, 2, N, H, D] what the named function has to."""
    read_token_major = name != "kv_postprocess_blksize_on_receive"
    for row in rows:
        planes = cache[row] if cache.ndim == 5 else cache[row][np.newaxis]
        for plane in planes:
            plane[...] = repaired_plane(plane.copy(), ratio, read_token_major=read_token_major)


# -- copy_blocks ---------------------------------------------------------------------------------


def has_two_tensors(layout: str) -> bool:
    """Tell whether a layer registers its keys and its values as tensors of their own."""
    return "H" in layout and "K" not in layout and "C" not in layout


def num_planes(layout: str) -> int:
    return 2 if "H" in layout or "K" in layout else 1


def tensor_shapes(layout: str, key_dim: int, value_dim: int, **sizes: int) -> list[tuple[int, ...]]:
    """Shapes of the tensors of `sizes["L"]` layers; the other letters' sizes are given likewise."""
    widths = [key_dim, value_dim] if has_two_tensors(layout) else [key_dim]
    sizes = {"K": 2, "C": key_dim + value_dim, **sizes}
    one_layer = [
        (*(sizes[axis] for axis in layout[:-1]), sizes.get(layout[-1], width)) for width in widths
    ]
    return one_layer * (1 if "L" in layout else sizes["L"])


def copy_by_hand(
    source: Sequence[np.ndarray],
    target: Sequence[np.ndarray],
    source_ids: Sequence[int],
    target_ids: Sequence[int],
    *,
    source_layout: str,
    target_layout: str,
    key_dim: int,
    layers: int,
    tokens: int,
    heads: int = 1,
) -> None:
    """Copy blocks vector by vector; a layout without `H` has one head, which no index names."""
    planes = num_planes(source_layout)
    for layer, plane, token, head in np.ndindex(layers, planes, tokens, heads):
        for source_id, target_id in zip(source_ids, target_ids, strict=True):
            place = {"L": layer, "K": plane, "N": token, "H": head}
            written = _vector(target, target_layout, key_dim, {**place, "B": target_id})
            written[...] = _vector(source, source_layout, key_dim, {**place, "B": source_id})


def _vector(
    tensors: Sequence[np.ndarray], layout: str, key_dim: int, place: dict[str, int]
) -> np.ndarray:
    """Return the view of one plane's elements of one head and token."""
    index = 0 if "L" in layout else place["L"]
    if has_two_tensors(layout):
        index = 2 * index + place["K"]
    content = tensors[index][tuple(place[axis] for axis in layout[:-1])]
    if layout[-1] == "C":
        content = content[key_dim:] if place["K"] else content[:key_dim]
    return content
