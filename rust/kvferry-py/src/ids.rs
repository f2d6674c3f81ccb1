//! Block ids of one group as the caller holds them, and cuts of them: copies of lists, views of arrays.

use numpy::{PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyMemoryView, PySequence, PySlice, PyTuple};

use crate::args::{MAX_IDS, is_id, is_text, refused, shown, wrong};

/// Ids that nobody has looked at: what they are shows where they are used.
pub enum BlockIds<'py> {
    List(Bound<'py, PyList>),
    Tuple(Bound<'py, PyTuple>),
    /// Whose slices are views.
    Array(Bound<'py, PyAny>),
    /// A range, a subclass of list, anything else that calls itself a sequence.
    Sequence(Bound<'py, PyAny>),
}

impl<'py> BlockIds<'py> {
    /// Takes one group's ids out of `field`; an array must be one-dimensional and of integers.
    pub fn new(field: &str, group: usize, ids: Bound<'py, PyAny>) -> PyResult<Self> {
        let wrong = |why: &str| {
            PyValueError::new_err(format!("{field}[{group}] {why}; pass a list or array of block ids"))
        };
        let ids = match ids.cast_into_exact::<PyList>() {
            Ok(list) => return Ok(Self::List(list)),
            Err(other) => other.into_inner(),
        };
        let ids = match ids.cast_into_exact::<PyTuple>() {
            Ok(tuple) => return Ok(Self::Tuple(tuple)),
            Err(other) => other.into_inner(),
        };
        let Some(array) = Array::of(&ids)? else {
            return if is_sequence(&ids) {
                Ok(Self::Sequence(ids))
            } else {
                Err(wrong(&format!("is {}, no sequence of block ids", shown(&ids))))
            };
        };
        if array.dimensions != 1 {
            return Err(wrong("is not one-dimensional"));
        }
        if !array.is_integer && array.values.len()? > 0 {
            return Err(wrong("does not hold integers"));
        }
        Ok(Self::Array(array.values))
    }

    pub fn len(&self) -> PyResult<usize> {
        match self {
            Self::List(list) => Ok(list.len()),
            Self::Tuple(tuple) => Ok(tuple.len()),
            Self::Array(ids) => ids.len(),
            Self::Sequence(ids) => length(ids),
        }
    }

    /// The ids `[begin, end)`, both at most [`Self::len`]: a list of their own, or a view of an array.
    pub fn cut(&self, begin: usize, end: usize) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Self::List(list) => Ok(list.get_slice(begin, end).into_any()),
            Self::Tuple(tuple) if (begin, end) == (0, tuple.len()) => Ok(tuple.to_list().into_any()),
            Self::Tuple(tuple) => Ok(tuple.get_slice(begin, end).to_list().into_any()),
            Self::Array(ids) => ids.get_item(slice(ids.py(), begin, end)),
            Self::Sequence(ids) => list_of(ids, begin, end),
        }
    }
}

/// Whether `field` is one group's ids, and not a sequence of such lists.
pub fn is_flat(field: &str, value: &Bound<'_, PyAny>) -> PyResult<bool> {
    if let Some(array) = Array::of(value)? {
        return Ok(array.dimensions != 2);
    }
    if !is_sequence(value) {
        return Err(wrong(field, value, "a sequence of block-id lists"));
    }
    if length(value)? == 0 {
        return Ok(false);
    }
    is_id(&value.get_item(0)?)
}

/// What a value says of itself where its slices are views.
struct Array<'py> {
    values: Bound<'py, PyAny>,
    dimensions: usize,
    is_integer: bool,
}

impl<'py> Array<'py> {
    /// A numpy array, a tensor that speaks DLPack, or whatever else exports its memory.
    fn of(value: &Bound<'py, PyAny>) -> PyResult<Option<Self>> {
        let (py, values) = (value.py(), value.clone());
        if let Ok(array) = value.cast::<PyUntypedArray>() {
            let is_integer = matches!(array.dtype().kind(), b'i' | b'u');
            return Ok(Some(Self { values, dimensions: array.ndim(), is_integer }));
        }
        // Bytes export their memory too, but are text more than ids.
        if value.is_instance_of::<PyBytes>() || value.is_instance_of::<PyList>() {
            return Ok(None);
        }
        if value.hasattr(intern!(py, "__dlpack__"))? {
            // Who says nothing of itself besides, numpy asks; it refuses memory of devices.
            if !value.hasattr(intern!(py, "dtype"))? || !value.hasattr(intern!(py, "ndim"))? {
                let unknown = || {
                    PyValueError::new_err(format!("{} is no array of block ids on the host", shown(value)))
                };
                let array = py.import("numpy")?.call_method1("from_dlpack", (value,));
                return Self::of(&array.map_err(|error| refused(error, value, unknown))?);
            }
            // Asking DLPack itself would synchronise with a device. All frameworks write "int64", some
            // behind their own name.
            let dtype = value.getattr(intern!(py, "dtype"))?.str()?.to_string();
            let name = dtype.rsplit('.').next().unwrap_or_default();
            let is_integer = name.starts_with("int") || name.starts_with("uint");
            let dimensions = value.getattr(intern!(py, "ndim"))?.extract()?;
            return Ok(Some(Self { values, dimensions, is_integer }));
        }
        let Ok(memory) = PyMemoryView::from(value) else { return Ok(None) };
        let dimensions = memory.getattr(intern!(py, "ndim"))?.extract()?;
        let format: String = memory.getattr(intern!(py, "format"))?.extract()?;
        // One code of the `struct` module, perhaps after a byte order.
        let code = format.trim_start_matches(['@', '=', '<', '>', '!']);
        let is_integer = code.len() == 1 && "bBhHiIlLqQnN".contains(code);
        Ok(Some(Self { values: memory.into_any(), dimensions, is_integer }))
    }
}

fn is_sequence(value: &Bound<'_, PyAny>) -> bool {
    !is_text(value) && value.cast::<PySequence>().is_ok()
}

fn list_of<'py>(ids: &Bound<'py, PyAny>, begin: usize, end: usize) -> PyResult<Bound<'py, PyAny>> {
    let py = ids.py();
    // A range may be longer than memory.
    if end.saturating_sub(begin) > MAX_IDS {
        return Err(too_many(ids));
    }
    match ids.get_item(slice(py, begin, end)) {
        Ok(cut) => py.get_type::<PyList>().call1((cut,)),
        // A sequence need not know slices.
        Err(error) if error.is_instance_of::<PyTypeError>(py) => {
            let cut = ids.try_iter()?.skip(begin).take(end.saturating_sub(begin));
            Ok(PyList::new(py, cut.collect::<PyResult<Vec<_>>>()?)?.into_any())
        }
        Err(error) => Err(error),
    }
}

/// Ids of a sequence; a range may have more than any length can say.
fn length(ids: &Bound<'_, PyAny>) -> PyResult<usize> {
    let is_too_long = |error: &PyErr| error.is_instance_of::<PyOverflowError>(ids.py());
    ids.len().map_err(|error| if is_too_long(&error) { too_many(ids) } else { error })
}

fn too_many(ids: &Bound<'_, PyAny>) -> PyErr {
    PyValueError::new_err(format!("ids of {} are more than {MAX_IDS}", shown(ids)))
}

/// Both ends are lengths, which fit.
fn slice(py: Python<'_>, begin: usize, end: usize) -> Bound<'_, PySlice> {
    PySlice::new(py, begin.cast_signed(), end.cast_signed(), 1)
}
