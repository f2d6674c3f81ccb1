"""The errors that callers tell apart, all beneath `KVFerryError`.

Each class is also the built-in that a caller would reach for, so ``except ValueError`` keeps
working where a connector was written before kvferry. An argument that makes no sense by itself
(a rank that no engine has, ``tp_size=0``) is a plain ``ValueError``, one of the wrong kind a
``TypeError``. Messages name what was asked and the limit.
"""

__all__ = [
    "AlignmentError",
    "BlockRangeError",
    "IncompatibleEnginesError",
    "KVFerryError",
    "LayoutError",
    "OverlapError",
    "TopologyError",
    "TransferError",
    "TransferTimeout",
]


class KVFerryError(Exception):
    """Root of every error that kvferry raises on purpose."""


class AlignmentError(KVFerryError, ValueError):
    """A token range or offset does not fall on a block (or slot) boundary where it must."""


class BlockRangeError(KVFerryError, ValueError, IndexError):
    """A block id, layer, layer name or tensor index that does not exist, or too few block ids."""


class OverlapError(KVFerryError, ValueError):
    """A destination byte is named twice, or source and target overlap without a defined result."""


class LayoutError(KVFerryError, ValueError):
    """A tensor's shape, strides, item size, device or writability contradicts its layout or use."""


class IncompatibleEnginesError(KVFerryError, ValueError):
    """Two engines can never exchange caches; raised when they are paired, never per request."""


class TopologyError(IncompatibleEnginesError, AssertionError):
    """Tensor-parallel or block sizes that do not fit, where callers catch assertions."""


class TransferError(KVFerryError, RuntimeError):
    """A transfer failed while it ran.

    Parameters
    ----------
    message
        What failed.
    failed_blocks
        ``(group, target block id)`` of every block whose content is not to be trusted.

    Examples
    --------
    >>> error = TransferError("peer went away", failed_blocks=[(0, 17), (1, 4)])
    >>> error.failed_blocks
    ((0, 17), (1, 4))
    """

    failed_blocks: tuple[tuple[int, int], ...]

    def __init__(self, message: str, failed_blocks: object = ()) -> None:
        super().__init__(message)
        self.failed_blocks = tuple((int(group), int(block)) for group, block in failed_blocks)  # type: ignore[attr-defined]


class TransferTimeout(TransferError, TimeoutError):
    """A transfer did not finish in time."""
