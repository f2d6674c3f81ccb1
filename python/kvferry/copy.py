"""Copies of whole blocks between tensors that belong to no engine, and repairs of received blocks.

Tensors are anything that speaks DLPack, in host or GPU memory; nothing is known of them but what a
call says. Bytes are moved, never interpreted, so that every dtype will do. Calls have finished when
they return, or been enqueued on a stream where GPU memory takes part (`kvferry.cuda`); other Python
threads run meanwhile.
"""

from __future__ import annotations

from kvferry._core import (
    copy_blocks,
    copy_kv_blocks,
    get_num_threads,
    kernels,
    kv_postprocess_blksize_and_layout_on_receive,
    kv_postprocess_blksize_on_receive,
    kv_postprocess_layout_on_receive,
    set_num_threads,
)

__all__ = [
    "copy_blocks",
    "copy_kv_blocks",
    "get_num_threads",
    "kernels",
    "kv_postprocess_blksize_and_layout_on_receive",
    "kv_postprocess_blksize_on_receive",
    "kv_postprocess_layout_on_receive",
    "set_num_threads",
]
