//! Arguments: Python numbers, ranges and block-id lists as the core's plain values.

use kvferry_core::Error;
use kvferry_core::engine::PerGroup;
use kvferry_core::interval::Interval;
use numpy::{PyArrayLikeDyn, PyReadonlyArray1, TypeMustMatch};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyRange, PyTuple};

use crate::errors::to_py;

/// A number that is not negative, such as a count or a token position.
pub fn natural(field: &str, value: &Bound<'_, PyAny>) -> PyResult<u64> {
    match value.extract::<i64>().map(u64::try_from) {
        Ok(Ok(number)) => Ok(number),
        _ => Err(PyValueError::new_err(format!("{field}={} is not an integer in [0, 2^63)", shown(value)))),
    }
}

/// A [`natural`] that indexes memory.
pub fn index(field: &str, value: &Bound<'_, PyAny>) -> PyResult<usize> {
    natural(field, value).map(|number| usize::try_from(number).unwrap_or(usize::MAX))
}

/// `(begin, end)`, whichever way round.
pub fn interval(field: &str, value: &Bound<'_, PyAny>) -> PyResult<Interval> {
    let wrong = || PyValueError::new_err(format!("{field}={} is not a (start, end) pair", shown(value)));
    let (begin, end) = value.extract::<(Bound<'_, PyAny>, Bound<'_, PyAny>)>().map_err(|_| wrong())?;
    Ok(Interval::new(natural(field, &begin)?, natural(field, &end)?))
}

/// A value given once, or a tuple of one a group.
pub fn per_group<'py, T>(
    value: &Bound<'py, PyAny>,
    one: impl Fn(&Bound<'py, PyAny>) -> PyResult<T>,
) -> PyResult<PerGroup<T>> {
    match value.cast::<PyTuple>() {
        Ok(each) => Ok(PerGroup::Each(each.iter().map(|value| one(&value)).collect::<PyResult<_>>()?)),
        Err(_) => Ok(PerGroup::Same(one(value)?)),
    }
}

/// One first token for all groups, or a sequence of one a group.
pub fn first_tokens(field: &str, value: &Bound<'_, PyAny>, groups: usize) -> PyResult<Vec<u64>> {
    if value.extract::<i128>().is_ok() {
        return Ok(vec![natural(field, value)?; groups]);
    }
    let Ok(each) = value.try_iter() else {
        return Err(PyValueError::new_err(format!(
            "{field}={} is neither an integer nor one a group",
            shown(value)
        )));
    };
    each.map(|value| natural(field, &value?)).collect()
}

/// Block ids, one list a group.
pub fn block_lists(field: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<i64>>> {
    let Ok(groups) = value.try_iter() else {
        return Err(PyValueError::new_err(format!("{field} must hold one list of block ids a group")));
    };
    groups.enumerate().map(|(group, ids)| block_ids(&format!("{field}[{group}]"), &ids?)).collect()
}

/// The ids of a list, tuple, range, or one-dimensional integer array.
fn block_ids(field: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    let is_plain = value.is_instance_of::<PyList>()
        || value.is_instance_of::<PyTuple>()
        || value.is_instance_of::<PyRange>();
    if is_plain {
        let mut ids = Vec::with_capacity(value.len()?);
        for id in value.try_iter()? {
            let id = id?;
            ids.push(id.extract().map_err(|_| not_an_id(field, &id))?);
        }
        return Ok(ids);
    }
    if let Ok(array) = value.extract::<PyReadonlyArray1<'_, i64>>() {
        return Ok(array.as_array().iter().copied().collect());
    }
    array_ids(field, value)
}

/// The ids of anything that numpy takes for an integer array.
fn array_ids(field: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    let wrong =
        |why: &str| PyValueError::new_err(format!("{field} {why}; pass a list or array of block ids"));
    let array =
        value.py().import("numpy")?.call_method1("asarray", (value,)).map_err(|_| wrong("is no array"))?;
    if array.getattr("ndim")?.extract::<usize>()? != 1 {
        return Err(wrong("is not one-dimensional"));
    }
    if array.len()? == 0 {
        return Ok(Vec::new());
    }
    let kind: String = array.getattr("dtype")?.getattr("kind")?.extract()?;
    match kind.as_str() {
        "i" => {
            let ids = array.call_method1("astype", ("int64",))?;
            let ids = ids.extract::<PyArrayLikeDyn<'_, i64, TypeMustMatch>>()?;
            Ok(ids.as_array().iter().copied().collect())
        }
        "u" => {
            let ids = array.call_method1("astype", ("uint64",))?;
            let ids = ids.extract::<PyArrayLikeDyn<'_, u64, TypeMustMatch>>()?;
            let id = |id: &u64| i64::try_from(*id).map_err(|_| too_large(field, id));
            ids.as_array().iter().map(id).collect()
        }
        _ => Err(wrong("does not hold integers")),
    }
}

fn not_an_id(field: &str, id: &Bound<'_, PyAny>) -> PyErr {
    if id.extract::<i128>().is_ok() {
        return too_large(field, shown(id));
    }
    PyValueError::new_err(format!("{field} holds {}, which is no block id", shown(id)))
}

fn too_large(field: &str, id: impl std::fmt::Display) -> PyErr {
    to_py(Error::BlockRange(format!("block id {id} in {field} is outside [-2^63, 2^63)")))
}

/// A value as the user would write it.
pub fn shown(value: &Bound<'_, PyAny>) -> String {
    value.repr().map_or_else(|_| "?".to_owned(), |text| text.to_string())
}
