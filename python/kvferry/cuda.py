"""Whether memory of GPUs can be copied here, and what a stream is owed.

The kernels are part of the package where it was built with a CUDA compiler; the driver is opened
when it is first needed. Tensors on a GPU can be registered, planned and described without either.

Copies and repairs of device memory are enqueued on the stream that the caller names by the driver's
handle (torch: ``stream.cuda_stream``), and have not finished when they return. That other streams
wait for them or are waited for, that the stream exists, and that tensors stay alive and are not
written to until it has passed, is the caller's part. Host memory that takes part must be pinned.
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
