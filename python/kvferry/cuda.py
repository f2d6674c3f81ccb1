"""Whether memory of GPUs can be copied here.

The kernels are part of the package where it was built with a CUDA compiler; the driver is opened
when it is first needed. Tensors on a GPU can be registered, planned and described without either.
"""

from __future__ import annotations

from kvferry._core import cuda_unavailable_reason

__all__ = ["available", "unavailable_reason"]


def available() -> bool:
    """Return whether tensors in CUDA memory can be copied.

    Examples
    --------
    >>> available() == (unavailable_reason() is None)
    True
    """
    return cuda_unavailable_reason() is None


def unavailable_reason() -> str | None:
    """Return why not: no kernels in this build, no driver, or no device; `None`: they can."""
    return cuda_unavailable_reason()
