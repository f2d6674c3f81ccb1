"""Whether memory of GPUs can be copied here, how fast the bus to one is, and what a stream is owed.

The kernels are part of the package where it was built with a CUDA compiler; the driver is opened
when it is first needed. Tensors on a GPU can be registered, planned and described without either.

Copies and repairs of device memory are enqueued on the stream that the caller names by the driver's
handle (torch: ``stream.cuda_stream``), and have not finished when they return. That other streams
wait for them or are waited for, that the stream exists, and that tensors stay alive and are not
written to until it has passed, is the caller's part. Host memory that takes part must be pinned.

A `kvferry.errors.TransferError` says that the driver has failed or refused something; so may a
`MemoryError`. Parts of the call may be enqueued then: wait for the stream before freeing tensors.
"""

from __future__ import annotations

import msgspec

from kvferry._core import CUDA_THRESHOLDS, calibrate_cuda, cuda_unavailable_reason

__all__ = [
    "BusSpeeds",
    "Calibration",
    "FragmentSpeeds",
    "available",
    "calibrate",
    "unavailable_reason",
]

# Of either side: so many that the bus is busy for most of the time that a call takes.
_CALIBRATION_BYTES = 64 << 20


def available() -> bool:
    """Return whether tensors in CUDA memory can be copied.

    This starts the driver in this process, as copies do: children that are forked later cannot
    use it, those that are spawned can.

    Examples
    --------
    >>> available() == (unavailable_reason() is None)
    True
    """
    return cuda_unavailable_reason() is None


def unavailable_reason() -> str | None:
    """Return why not, such as that there is no driver or no device; `None`: they can."""
    return cuda_unavailable_reason()


class FragmentSpeeds(msgspec.Struct, frozen=True):
    """Bytes per second of fragments of one size, from the call to the end of the copy."""

    num_bytes: int  # of each fragment
    kernel: float
    engine: float  # by the copy engine


class BusSpeeds(msgspec.Struct, frozen=True):
    """What a bus does in one direction."""

    plain: float  # bytes per second of one contiguous copy
    fragments: tuple[FragmentSpeeds, ...]  # by size, ascending


class Calibration(msgspec.Struct, frozen=True):
    """Speeds between pinned memory and a device, and the thresholds that they ask for.

    Examples
    --------
    >>> bus = BusSpeeds(5e10, (FragmentSpeeds(4096, 2e10, 5e9), FragmentSpeeds(65536, 2e10, 4e10)))
    >>> calibration = Calibration(bus, bus, 65536, 65536, 16)
    >>> calibration.thresholds()["KVFERRY_CUDA_UPLOAD_BYTES"]
    65536
    """

    upload: BusSpeeds
    download: BusSpeeds
    upload_bytes: int  # fragments of so many bytes go to the device by the copy engine
    download_bytes: int  # the same, to the host
    min_kernel_pieces: int  # fewer smaller ones in a call go by the copy engine, too

    def thresholds(self) -> dict[str, int]:
        """Return the environment variables that set them, with their values."""
        values = self.upload_bytes, self.download_bytes, self.min_kernel_pieces
        return dict(zip(CUDA_THRESHOLDS, values, strict=True))


def calibrate(device: int = 0) -> Calibration:
    """Measure for some seconds which way is faster over the bus, by the size of fragments.

    Takes 64 MiB of pinned memory and of the device's; both, and the bus, should have nothing else
    to do. ``kvferry calibrate`` prints the result.

    Parameters
    ----------
    device
        Which one, as frameworks count them.

    Returns
    -------
    Calibration
        Nothing is set: export its `Calibration.thresholds` for processes to come.

    Raises
    ------
    LayoutError
        There is no such device, or none can be used: `unavailable_reason`.
    """
    upload, download, thresholds = calibrate_cuda(device, _CALIBRATION_BYTES)
    return Calibration(_bus(*upload), _bus(*download), *thresholds)


def _bus(plain: float, fragments: list[tuple[int, float, float]]) -> BusSpeeds:
    return BusSpeeds(plain, tuple(FragmentSpeeds(*speeds) for speeds in fragments))
