//! Arguments: Python numbers, ranges and block-id lists as the core's plain values.

use std::fmt::Display;

use kvferry_core::interval::Interval;
use kvferry_core::memory::tensor::Device;
use kvferry_core::specs::engine::PerGroup;
use kvferry_core::{Error, counted};
use numpy::{PyArray1, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::exceptions::{PyException, PyMemoryError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyList, PyMapping, PyRange, PyString, PyTuple};

use crate::errors::to_py;

/// Bound on the ids of one list, so that none can exhaust memory: 2 GiB of them.
pub const MAX_IDS: usize = 1 << 28;
/// Bound on a value's text in a message.
const MAX_SHOWN: usize = 120;
/// What stands for a null block id that no 64-bit integer can hold; as a block id it is never valid.
pub const FAR_NULL_BLOCK: i64 = i64::MIN;

/// A number that is not negative, such as a count or a token position.
pub fn natural(field: &str, value: &Bound<'_, PyAny>) -> PyResult<u64> {
    match value.extract::<i64>().map(u64::try_from) {
        Ok(Ok(number)) => Ok(number),
        Ok(Err(_)) => Err(wrong(field, value, "an integer in [0, 2^63)")),
        Err(error) => Err(refused(error, value, || wrong(field, value, "an integer in [0, 2^63)"))),
    }
}

/// A [`natural`] that indexes memory.
pub fn index(field: &str, value: &Bound<'_, PyAny>) -> PyResult<usize> {
    natural(field, value).map(|number| usize::try_from(number).unwrap_or(usize::MAX))
}

/// The items of a sequence, where it is one; `what` says what it should be.
pub fn items<'py>(
    field: &str,
    value: &Bound<'py, PyAny>,
    what: &str,
) -> PyResult<impl Iterator<Item = PyResult<Bound<'py, PyAny>>>> {
    value.try_iter().map_err(|error| refused(error, value, || wrong(field, value, what)))
}

/// `(begin, end)`, whichever way round.
pub fn interval(field: &str, value: &Bound<'_, PyAny>) -> PyResult<Interval> {
    let what = "a (start, end) pair";
    let ends = items(field, value, what)?.take(3).collect::<PyResult<Vec<_>>>()?;
    match ends.as_slice() {
        [begin, end] => Ok(Interval::new(natural(field, begin)?, natural(field, end)?)),
        _ => Err(wrong(field, value, what)),
    }
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
    if !value.hasattr("__iter__")? {
        return Ok(vec![natural(field, value)?; groups]);
    }
    // One more than there are groups is enough to see that the number is wrong.
    items(field, value, "one integer a group")?
        .take(groups + 1)
        .map(|value| natural(field, &value?))
        .collect()
}

/// Block ids, one list a group; `null_of` gives a group's null block id as the user wrote it.
pub fn block_lists<'py>(
    field: &str,
    value: &Bound<'py, PyAny>,
    groups: usize,
    null_of: impl Fn(usize) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Vec<Vec<i64>>> {
    const WHAT: &str = "one list of block ids a group";
    // What text and mappings iterate over is no list. To ask what is plain would take as long as a small plan.
    let is_plain = value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>();
    if !is_plain && (is_text(value) || value.cast::<PyMapping>().is_ok()) {
        return Err(wrong(field, value, WHAT));
    }
    let lists: Vec<_> = items(field, value, WHAT)?.take(groups + 1).collect::<PyResult<_>>()?;
    let for_groups = || format!("for {}", counted(groups, "group"));
    if let Some(first) = lists.first()
        && is_id(first)?
    {
        let (flat, others) = (shown(value), if groups > 1 { ", …" } else { "" });
        return Err(PyValueError::new_err(format!(
            "{field} is one flat list {}; pass {WHAT}, such as [{flat}{others}]",
            for_groups()
        )));
    }
    if lists.len() != groups {
        let held = if lists.len() > groups { "more lists".into() } else { counted(lists.len(), "list") };
        return Err(PyValueError::new_err(format!("{field} holds {held} {}; pass {WHAT}", for_groups())));
    }
    let ids = |(group, ids): (usize, &Bound<'py, PyAny>)| {
        IdReader { field: format!("{field}[{group}]"), null: Some(null_of(group)?) }.read(ids)
    };
    lists.iter().enumerate().map(ids).collect()
}

/// Block ids of a list, tuple, range, or anything that numpy takes for an integer array.
pub fn block_ids(field: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
    IdReader { field: field.to_owned(), null: None }.read(value)
}

/// Threads that may take part; `None` where the caller leaves it open.
pub fn threads(value: Option<&Bound<'_, PyAny>>) -> PyResult<Option<usize>> {
    match value.map(|value| index("threads", value)).transpose()? {
        Some(0) => Err(PyValueError::new_err("threads=0 is not positive")),
        threads => Ok(threads),
    }
}

/// Reads one group's block ids.
struct IdReader<'py> {
    field: String,
    /// The null block id as the user wrote it, where lists may have one.
    null: Option<Bound<'py, PyAny>>,
}

impl<'py> IdReader<'py> {
    /// The ids of a list, tuple, range, or one-dimensional integer array.
    fn read(&self, value: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
        let is_plain = value.is_instance_of::<PyList>()
            || value.is_instance_of::<PyTuple>()
            || value.is_instance_of::<PyRange>();
        if !is_plain {
            return self.array_ids(value);
        }
        // A range may be longer than memory, and a subclass of list may say any length.
        let too_many = || self.wrong(&format!("holds more than {MAX_IDS} ids"));
        if value.len().map_err(|error| refused(error, value, too_many))? > MAX_IDS {
            return Err(too_many());
        }
        let mut ids = Vec::new();
        for id in value.try_iter()? {
            if ids.len() == MAX_IDS {
                return Err(too_many());
            }
            let id = id?;
            ids.push(match id.extract() {
                Ok(id) => self.near_id(id)?,
                Err(error) => self.far_id(error, &id)?,
            });
        }
        Ok(ids)
    }

    /// The ids of anything that numpy takes for an integer array.
    fn array_ids(&self, value: &Bound<'_, PyAny>) -> PyResult<Vec<i64>> {
        // What engines hand over needs none of numpy's help, which takes longer than a small copy does.
        if let Ok(ids) = value.cast::<PyArray1<i64>>()
            && ids.is_c_contiguous()
            && ids.data().is_aligned()
            && ids.len() <= MAX_IDS
        {
            return self.near_ids(ids);
        }
        let numpy = value.py().import("numpy")?;
        let array = imported(&numpy, value)
            .map_err(|error| refused(error, value, || self.wrong("is no list of block ids")))?;
        match array.getattr("ndim")?.extract()? {
            1_usize => {}
            0 => return Err(self.wrong(&format!("is {}", shown(value)))),
            _ => return Err(self.wrong("is not one-dimensional")),
        }
        if array.len()? == 0 {
            return Ok(Vec::new());
        }
        if array.len()? > MAX_IDS {
            return Err(self.wrong(&format!("holds more than {MAX_IDS} ids")));
        }
        // A field of a packed record is neither aligned nor evenly spaced; `require` copies such.
        let plain = |dtype: &str| numpy.call_method1("require", (&array, dtype, ("C", "A")));
        let kind: String = array.getattr("dtype")?.getattr("kind")?.extract()?;
        match kind.as_str() {
            "i" => self.near_ids(plain("int64")?.cast::<PyArray1<i64>>()?),
            "u" => {
                let ids = plain("uint64")?.cast_into::<PyArray1<u64>>()?;
                let id = |id: &u64| match i64::try_from(*id) {
                    Ok(id) => Ok(id),
                    Err(_) if self.is_null(*id)? => Ok(FAR_NULL_BLOCK),
                    Err(_) => Err(self.too_large(id)),
                };
                ids.try_readonly()?.as_slice()?.iter().map(id).collect()
            }
            _ => Err(self.wrong("does not hold integers")),
        }
    }

    /// The ids of an aligned array without gaps.
    fn near_ids(&self, ids: &Bound<'_, PyArray1<i64>>) -> PyResult<Vec<i64>> {
        ids.try_readonly()?.as_slice()?.iter().map(|id| self.near_id(*id)).collect()
    }

    /// The stand-in of a null block is no id of its own.
    fn near_id(&self, id: i64) -> PyResult<i64> {
        let is_stand_in = id == FAR_NULL_BLOCK && self.null.is_some();
        if is_stand_in && !self.is_null(id)? { Err(self.too_large(id)) } else { Ok(id) }
    }

    /// An id that is no 64-bit integer can only be the null block.
    fn far_id(&self, error: PyErr, id: &Bound<'_, PyAny>) -> PyResult<i64> {
        if id.is_instance_of::<PyInt>() {
            return if self.is_null(id)? { Ok(FAR_NULL_BLOCK) } else { Err(self.too_large(shown(id))) };
        }
        Err(refused(error, id, || self.wrong(&format!("holds {}, which is no block id", shown(id)))))
    }

    fn is_null(&self, id: impl IntoPyObject<'py>) -> PyResult<bool> {
        self.null.as_ref().map_or(Ok(false), |null| null.eq(id))
    }

    fn too_large(&self, id: impl Display) -> PyErr {
        to_py(Error::BlockRange(format!("block id {id} in {} is outside [0, 2^63)", self.field)))
    }

    fn wrong(&self, why: &str) -> PyErr {
        PyValueError::new_err(format!("{} {why}; pass a list or array of block ids", self.field))
    }
}

/// What numpy makes of a value: of one that it does not know, an array of no dimensions.
fn imported<'py>(numpy: &Bound<'py, PyModule>, value: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
    let on_host = |value: &Bound<'py, PyAny>| {
        // Of a tensor that speaks nothing but DLPack, `asarray` would make an object.
        let speaks_dlpack = value.hasattr("__dlpack__")? && !value.hasattr("__array__")?;
        numpy.call_method1(if speaks_dlpack { "from_dlpack" } else { "asarray" }, (value,))
    };
    on_host(value).or_else(|error| on_host(&from_device(value).ok_or(error)?))
}

/// A copy on the host of an array on a device, by the names that frameworks give to making one. It waits
/// for the device.
fn from_device<'py>(value: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
    let device = value.call_method0("__dlpack_device__").ok()?;
    let (kind, index) = device.extract::<(i32, i32)>().ok()?;
    let is_cuda = Device { kind, index }.is_cuda();
    is_cuda.then(|| value.call_method0("cpu").or_else(|_| value.call_method0("get")).ok())?
}

/// Whether it is one integer; an array of one passes for an integer too, so it must have no length.
pub fn is_id(value: &Bound<'_, PyAny>) -> PyResult<bool> {
    if value.is_instance_of::<PyInt>() || value.len().is_ok() {
        return Ok(value.is_instance_of::<PyInt>());
    }
    match value.extract::<i64>() {
        Err(error) if !is_refusal(&error, value) => Err(error),
        id => Ok(id.is_ok()),
    }
}

/// Text is a sequence too, but never of block ids.
pub fn is_text(value: &Bound<'_, PyAny>) -> bool {
    value.is_instance_of::<PyString>() || value.is_instance_of::<PyBytes>()
}

/// Turns an error that only says that a value is of the wrong kind into one that names it. Interrupts
/// and exhausted memory are nobody's wrong value.
pub fn refused(error: PyErr, value: &Bound<'_, PyAny>, named: impl FnOnce() -> PyErr) -> PyErr {
    if is_refusal(&error, value) { named() } else { error }
}

fn is_refusal(error: &PyErr, value: &Bound<'_, PyAny>) -> bool {
    let py = value.py();
    error.is_instance_of::<PyException>(py) && !error.is_instance_of::<PyMemoryError>(py)
}

/// `field=value is not what it should be`.
pub fn wrong(field: &str, value: &Bound<'_, PyAny>, what: &str) -> PyErr {
    PyValueError::new_err(format!("{field}={} is not {what}", shown(value)))
}

/// A value as the user would write it, if that is short.
pub fn shown(value: &Bound<'_, PyAny>) -> String {
    let text = value.repr().map_or_else(|_| "?".to_owned(), |text| text.to_string());
    match text.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
