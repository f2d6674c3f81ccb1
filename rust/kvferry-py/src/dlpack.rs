//! `DLPack` import: the seam between memory that Python owns and the core's plain addresses.
//!
//! Contract. A [`ManagedTensor`] is made from a capsule that nobody has consumed; it renames the capsule,
//! which makes it the owner, and calls the producer's deleter exactly once, when it is dropped. Until
//! then the producer keeps the memory alive. Nothing else of the producer's is trusted: sizes, strides
//! and pointers are copied out and checked before they become a [`RawTensor`].
//!
//! The structures follow the `DLPack` specification, `dlpack.h` version 1.0.

use std::ffi::{CStr, c_void};
use std::ptr::{self, NonNull};
use std::slice;

use kvferry_core::memory::tensor::{Device, RawTensor};
use kvferry_core::{Error, counted};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyDict};
use pyo3::{ffi, intern};

use crate::args::{refused, shown};
use crate::errors::to_py;

const VERSIONED: (&CStr, &CStr) = (c"dltensor_versioned", c"used_dltensor_versioned");
const UNVERSIONED: (&CStr, &CStr) = (c"dltensor", c"used_dltensor");
const MAJOR_VERSION: u32 = 1;
const FLAG_READ_ONLY: u64 = 1;
const FLAG_IS_COPIED: u64 = 2;
/// Tells a producer on a GPU not to wait for anything, in the protocol's own number.
const NO_SYNCHRONISATION: i32 = -1;
/// Bound on dimensions, so that a wild count is never walked; a layout has at most seven letters.
pub const MAX_DIMENSIONS: usize = 64;

#[repr(C)]
pub struct DLDataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

#[repr(C)]
pub struct DLTensor {
    data: *mut c_void,
    device_kind: i32,
    device_index: i32,
    dimensions: i32,
    dtype: DLDataType,
    shape: *const i64,
    strides: *const i64,
    byte_offset: u64,
}

#[repr(C)]
pub struct DLManagedTensor {
    tensor: DLTensor,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
}

#[repr(C)]
pub struct DLManagedTensorVersioned {
    major: u32,
    minor: u32,
    context: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Self)>,
    flags: u64,
    tensor: DLTensor,
}

/// A producer's tensor that stays alive until this is dropped.
pub enum ManagedTensor {
    Versioned(Owned<DLManagedTensorVersioned>),
    Unversioned(Owned<DLManagedTensor>),
}

/// Sole owner of a producer's structure.
pub struct Owned<T: Delete>(NonNull<T>);

/// A structure that carries its own deleter.
pub trait Delete {
    /// Gives the structure back to its producer.
    ///
    /// # Safety
    ///
    /// Once, with a pointer to a live structure that nobody uses afterwards.
    unsafe fn delete(this: *mut Self);
}

impl Delete for DLManagedTensor {
    unsafe fn delete(this: *mut Self) {
        // SAFETY: the caller passes a live structure, whose deleter takes its own address.
        unsafe {
            if let Some(deleter) = (*this).deleter {
                deleter(this);
            }
        }
    }
}

impl Delete for DLManagedTensorVersioned {
    unsafe fn delete(this: *mut Self) {
        // SAFETY: the caller passes a live structure, whose deleter takes its own address.
        unsafe {
            if let Some(deleter) = (*this).deleter {
                deleter(this);
            }
        }
    }
}

impl<T: Delete> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: `Owned` is the structure's only owner since the capsule was renamed, and dies here.
        let delete = || unsafe { T::delete(self.0.as_ptr()) };
        // Only a thread that is attached has an error to lose. Any thread may drop this; where there is no
        // interpreter any more, the deleter is the producer's affair alone.
        if Python::try_attach(|py| with_error_aside(py, delete)).is_none() {
            delete();
        }
    }
}

/// Calls a deleter, which may be Python's, as Python is called: with no error set. A cache also dies while
/// an error unwinds its frame, and that error must come through.
fn with_error_aside(_attached: Python<'_>, delete: impl FnOnce()) {
    let (mut kind, mut value, mut trace) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
    // SAFETY: the thread is attached, and the three are places for references, null or owned.
    unsafe { ffi::PyErr_Fetch(&raw mut kind, &raw mut value, &raw mut trace) };
    delete();
    // SAFETY: as above; the references are given back, and whatever the deleter has set is dropped.
    unsafe { ffi::PyErr_Restore(kind, value, trace) };
}

// SAFETY: DLPack lets the consumer read the structure and call the deleter from any thread; kvferry
// reads it only while it imports.
unsafe impl<T: Delete> Send for Owned<T> {}
// SAFETY: as above; after the import nothing reads it through a shared reference.
unsafe impl<T: Delete> Sync for Owned<T> {}

/// Takes over a tensor of the producer `object`, with `name` for messages.
pub fn import(name: &str, object: &Bound<'_, PyAny>) -> PyResult<(ManagedTensor, RawTensor)> {
    let device = stated_device(name, object)?;
    let managed = take(name, &capsule(name, object, device)?)?;
    let raw = managed.describe().map_err(|why| layout_error(name, &why))?;
    let is_same = raw.device == device || raw.device.is_host() && device.is_host();
    if !is_same {
        let why = format!("is on {}, though its producer said that it is on {device}", raw.device);
        return Err(layout_error(name, &why));
    }
    Ok((managed, raw))
}

fn layout_error(name: &str, why: &str) -> PyErr {
    to_py(Error::Layout(format!("tensor {name:?} {why}")))
}

/// The device is asked first: a producer on another device may not even be able to export.
fn stated_device(name: &str, object: &Bound<'_, PyAny>) -> PyResult<Device> {
    let py = object.py();
    let device = object
        .getattr(intern!(py, "__dlpack_device__"))
        .map_err(|error| refused(error, object, || speaks_no_dlpack(name, object)))?;
    let not_exported = |error: PyErr| not_exported(name, object, error);
    let device = device.call0().map_err(not_exported)?;
    let Ok((kind, index)) = device.extract::<(i32, i32)>() else {
        return Err(layout_error(
            name,
            &format!("says that it is on {}, which is no DLPack device", shown(&device)),
        ));
    };
    let device = Device { kind, index };
    if device.is_host() || device.is_cuda() {
        return Ok(device);
    }
    Err(layout_error(name, &format!("is on {device}; pass a tensor in host or CUDA memory")))
}

/// Asks for a versioned capsule, and for an unversioned one where the producer knows no versions.
fn capsule<'py>(name: &str, object: &Bound<'py, PyAny>, device: Device) -> PyResult<Bound<'py, PyCapsule>> {
    let py = object.py();
    let export = object
        .getattr(intern!(py, "__dlpack__"))
        .map_err(|error| refused(error, object, || speaks_no_dlpack(name, object)))?;
    let unversioned = PyDict::new(py);
    if device.is_cuda() {
        // What the tensor's stream has still to do is the caller's to order before the copy's.
        unversioned.set_item("stream", NO_SYNCHRONISATION)?;
    }
    let versioned = unversioned.copy()?;
    versioned.set_item("max_version", (MAJOR_VERSION, 0))?;
    let exported = export.call((), Some(&versioned)).or_else(|error| {
        let knows_no_versions = error.is_instance_of::<PyTypeError>(py);
        if knows_no_versions { export.call((), Some(&unversioned)) } else { Err(error) }
    });
    let capsule = exported.map_err(|error| not_exported(name, object, error))?;
    capsule.cast_into().map_err(|_| layout_error(name, "was exported as something that is no capsule"))
}

fn speaks_no_dlpack(name: &str, object: &Bound<'_, PyAny>) -> PyErr {
    PyTypeError::new_err(format!("tensor {name:?} does not speak DLPack: {}", shown(object)))
}

/// The producer's own reason, such as that a tensor requires gradients, with the tensor's name.
fn not_exported(name: &str, object: &Bound<'_, PyAny>, error: PyErr) -> PyErr {
    let reason = error.value(object.py()).to_string();
    refused(error, object, || layout_error(name, &format!("cannot be exported: {reason}")))
}

/// Becomes the owner of what an unconsumed capsule holds.
fn take(name: &str, capsule: &Bound<'_, PyCapsule>) -> PyResult<ManagedTensor> {
    if let Some(structure) = consume::<DLManagedTensorVersioned>(capsule, VERSIONED) {
        return Ok(ManagedTensor::Versioned(structure));
    }
    if let Some(structure) = consume::<DLManagedTensor>(capsule, UNVERSIONED) {
        return Ok(ManagedTensor::Unversioned(structure));
    }
    Err(layout_error(name, "was exported in a capsule that is no unused DLPack capsule"))
}

/// Renames a capsule of the first name to the second, and takes what it points to.
fn consume<T: Delete>(
    capsule: &Bound<'_, PyCapsule>,
    (fresh, used): (&CStr, &'static CStr),
) -> Option<Owned<T>> {
    let object = capsule.as_ptr();
    // SAFETY: `capsule` is a live capsule and the thread is attached; both names are C strings, the one
    // that stays in the capsule static. A capsule named `fresh` holds a `T` by DLPack's convention.
    unsafe {
        if ffi::PyCapsule_IsValid(object, fresh.as_ptr()) == 0 {
            return None;
        }
        let structure = NonNull::new(ffi::PyCapsule_GetPointer(object, fresh.as_ptr()).cast::<T>())?;
        (ffi::PyCapsule_SetName(object, used.as_ptr()) == 0).then_some(Owned(structure))
    }
}

impl ManagedTensor {
    /// Copies out what the tensor says of itself; the error continues a sentence about it.
    fn describe(&self) -> Result<RawTensor, String> {
        match self {
            Self::Versioned(owned) => {
                let structure = owned.0.as_ptr();
                // SAFETY: we own the structure, so it is live; the version is at the front of every
                // version, and the rest is read only where it is the one that this module knows.
                let (tensor, flags) = unsafe {
                    if (*structure).major != MAJOR_VERSION {
                        return Err(format!(
                            "has DLPack version {}, not {MAJOR_VERSION}",
                            (*structure).major
                        ));
                    }
                    (&(*structure).tensor, (*structure).flags)
                };
                if flags & FLAG_IS_COPIED != 0 {
                    return Err("was copied by its producer, writes to it would be lost".to_owned());
                }
                describe(tensor, flags & FLAG_READ_ONLY == 0)
            }
            // SAFETY: we own the structure, so it is live.
            Self::Unversioned(owned) => describe(unsafe { &owned.0.as_ref().tensor }, true),
        }
    }
}

fn describe(tensor: &DLTensor, writable: bool) -> Result<RawTensor, String> {
    let shape = extents(tensor.shape, tensor.dimensions)?.ok_or("has no shape")?;
    if let Some(size) = shape.iter().find(|size| **size < 0) {
        return Err(format!("has a negative size {size}"));
    }
    let item_bits = u64::from(tensor.dtype.bits) * u64::from(tensor.dtype.lanes);
    if item_bits == 0 || !item_bits.is_multiple_of(8) {
        return Err(format!("has items of {}, not of whole bytes", counted(item_bits, "bit")));
    }
    let item_bytes = item_bits / 8;
    let strides = match extents(tensor.strides, tensor.dimensions)? {
        Some(strides) => strides,
        None => compact_strides(&shape)?,
    };
    // Nothing steps along an axis of one item, so its stride may be anything.
    let in_bytes = |(size, stride): (&i64, &i64)| {
        if *size <= 1 { Some(0) } else { stride.checked_mul(item_bytes.cast_signed()) }
    };
    let strides: Option<Vec<i64>> = shape.iter().zip(&strides).map(in_bytes).collect();
    let strides = strides.ok_or("has a stride beyond 2^63 bytes")?;
    let first = tensor.data.expose_provenance() as u64;
    if first == 0 && !shape.contains(&0) {
        return Err("has no memory".to_owned());
    }
    let address = first.checked_add(tensor.byte_offset).ok_or("has an offset beyond its memory")?;
    let device = Device { kind: tensor.device_kind, index: tensor.device_index };
    Ok(RawTensor { address, shape, strides, item_bytes, device, writable })
}

/// Copies an array of one number a dimension; `None` for a null pointer.
fn extents(numbers: *const i64, dimensions: i32) -> Result<Option<Vec<i64>>, String> {
    let count = match usize::try_from(dimensions) {
        Ok(count) if count <= MAX_DIMENSIONS => count,
        _ => return Err(format!("has {}", counted(dimensions, "dimension"))),
    };
    if count == 0 {
        return Ok(Some(Vec::new()));
    }
    if ptr::eq(numbers, ptr::null()) {
        return Ok(None);
    }
    // SAFETY: DLPack's producer guarantees `dimensions` numbers behind a pointer that is not null, and
    // they live as long as the structure, which the caller holds.
    Ok(Some(unsafe { slice::from_raw_parts(numbers, count) }.to_vec()))
}

/// Row-major strides in items, which a null pointer stands for.
fn compact_strides(shape: &[i64]) -> Result<Vec<i64>, String> {
    let mut strides = vec![1_i64; shape.len()];
    for index in (1..shape.len()).rev() {
        let outer = strides[index].checked_mul(shape[index].max(1)).ok_or("exceeds 2^63 items")?;
        strides[index - 1] = outer;
    }
    Ok(strides)
}
