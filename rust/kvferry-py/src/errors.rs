//! The mapping from the core's errors to the tree in `kvferry.errors`.

use kvferry_core::Error;
use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyType;

/// Turns a core error into the Python exception of its kind.
pub fn to_py(error: Error) -> PyErr {
    let (class, message) = match error {
        Error::Value(message) => return PyValueError::new_err(message),
        Error::Memory(message) => return PyMemoryError::new_err(message),
        Error::Alignment(message) => ("AlignmentError", message),
        Error::BlockRange(message) => ("BlockRangeError", message),
        Error::Overlap(message) => ("OverlapError", message),
        Error::Layout(message) => ("LayoutError", message),
        Error::Incompatible(message) => ("IncompatibleEnginesError", message),
        Error::Topology(message) => ("TopologyError", message),
        Error::Transfer(message) => ("TransferError", message),
    };
    Python::attach(|py| {
        let found = py.import("kvferry.errors").and_then(|module| module.getattr(class));
        match found.and_then(|class| Ok(class.cast_into::<PyType>()?)) {
            Ok(class) => PyErr::from_type(class, message),
            Err(error) => error,
        }
    })
}

/// Results whose error becomes a Python exception.
pub trait OrRaise<T> {
    /// Raises the core's error, if any.
    fn or_raise(self) -> PyResult<T>;
}

impl<T> OrRaise<T> for kvferry_core::Result<T> {
    fn or_raise(self) -> PyResult<T> {
        self.map_err(to_py)
    }
}
