"""Hand-made DLPack producers that count how often their deleter runs."""

from __future__ import annotations

import ctypes
from typing import Any

CPU, CUDA, CUDA_HOST, ROCM, CUDA_MANAGED = 1, 2, 3, 10, 13
UINT = 1
READ_ONLY, IS_COPIED = 1, 2

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype = ctypes.c_int
_is_valid.argtypes = [ctypes.py_object, ctypes.c_char_p]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_kind", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    ]


class Producer:
    """A tensor of 2-byte items that speaks DLPack as told, and counts `deleted`.

    Everything that a consumer reads can be set by itself, sense or nonsense. Its memory outlives it
    on purpose, so that a consumer that reads too late is noticed by `deleted` and not by a crash.
    It is the one that is given, else 16 KiB of its own.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        *,
        versioned: bool = True,
        knows_versions: bool = True,
        device: Any = (CPU, 0),
        stated_device: Any = None,
        dimensions: int | None = None,
        bits: int = 16,
        lanes: int = 1,
        byte_offset: int = 0,
        major: int = 1,
        flags: int = 0,
        null_data: bool = False,
        null_shape: bool = False,
        has_deleter: bool = True,
        on_delete: Any = None,
        memory: Any = None,
    ) -> None:
        self.deleted = 0
        self.exported = 0
        self.capsule: Any = None
        self.options: dict[str, Any] = {}
        self._knows_versions = knows_versions
        self._versioned = versioned
        self._on_delete = on_delete
        self._device = device if stated_device is None else stated_device
        self.memory = (ctypes.c_uint8 * (1 << 14))() if memory is None else memory
        self._shape = (ctypes.c_int64 * max(1, len(shape)))(*shape)
        self._strides = (
            None if strides is None else (ctypes.c_int64 * max(1, len(strides)))(*strides)
        )
        self._deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._delete)
        tensor = _Tensor(
            data=None if null_data else ctypes.addressof(self.memory),
            device_kind=device[0],
            device_index=device[1],
            dimensions=len(shape) if dimensions is None else dimensions,
            code=UINT,
            bits=bits,
            lanes=lanes,
            shape=None if null_shape else ctypes.addressof(self._shape),
            strides=None if self._strides is None else ctypes.addressof(self._strides),
            byte_offset=byte_offset,
        )
        deleter = ctypes.cast(self._deleter, ctypes.c_void_p) if has_deleter else None
        if versioned:
            self._managed: Any = _ManagedVersioned(
                major=major, minor=0, context=None, deleter=deleter, flags=flags, tensor=tensor
            )
        else:
            self._managed = _Managed(tensor=tensor, context=None, deleter=deleter)

    @property
    def address(self) -> int:
        return ctypes.addressof(self.memory)

    def _delete(self, managed: int) -> None:
        assert managed == ctypes.addressof(self._managed)
        self.deleted += 1
        if self._on_delete is not None:
            self._on_delete()

    def __dlpack_device__(self) -> Any:
        return self._device

    def __dlpack__(self, **options: Any) -> Any:
        self.options = options
        if "max_version" in options and not self._knows_versions:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        self.exported += 1
        name = b"dltensor_versioned" if self._versioned else b"dltensor"
        self.capsule = _new_capsule(ctypes.addressof(self._managed), name, None)
        return self.capsule

    @property
    def is_consumed(self) -> bool:
        used = b"used_dltensor_versioned" if self._versioned else b"used_dltensor"
        return bool(_is_valid(self.capsule, used))
