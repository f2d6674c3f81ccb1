//! `kvferry.groups`: engine groups by their attributes, and cuts of their block-id lists.

use kvferry_core::groups::{self, KvGroup, MAX_ENGINE_GROUPS, MAX_LAYERS};
use kvferry_core::interval::Interval;
use kvferry_core::{Error, counted};
use pyo3::exceptions::PyValueError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyList, PyMapping, PyTuple};

use crate::args::{index, items, natural, refused, shown, wrong};
use crate::errors::{OrRaise, to_py};
use crate::ids::{BlockIds, is_flat};

/// Block-id lists that a request has: the highest engine group id plus one, 1 without groups.
///
/// Parameters
/// ----------
/// groups
///     KV groups in protocol order; anything with the attributes of `EngineGroupInfo`.
///
/// Raises
/// ------
/// ValueError
///     An engine group id is outside ``[0, 65536)``.
///
/// Examples
/// --------
/// >>> from kvferry.groups import EngineGroupInfo, num_engine_groups
/// >>> num_engine_groups([EngineGroupInfo(0), EngineGroupInfo(2), EngineGroupInfo(0)])
/// 3
/// >>> num_engine_groups([])
/// 1
#[pyfunction]
pub fn num_engine_groups(groups: &Bound<'_, PyAny>) -> PyResult<usize> {
    Ok(groups::num_engine_groups(engine_groups(groups)?.into_iter()))
}

/// Number of KV groups, 1 without groups.
///
/// Parameters
/// ----------
/// groups
///     KV groups in protocol order.
///
/// Examples
/// --------
/// >>> from kvferry.groups import EngineGroupInfo, num_engine_group_infos
/// >>> num_engine_group_infos([EngineGroupInfo(0), EngineGroupInfo(2), EngineGroupInfo(0)])
/// 3
/// >>> num_engine_group_infos([])
/// 1
#[pyfunction]
pub fn num_engine_group_infos(groups: &Bound<'_, PyAny>) -> PyResult<usize> {
    Ok(each_group(groups)?.len().max(1))
}

/// Engine group id of each KV group as it was stated, ``(0,)`` without groups.
///
/// Parameters
/// ----------
/// groups
///     KV groups in protocol order; anything with an ``engine_group_id``.
///
/// Examples
/// --------
/// >>> from kvferry.groups import EngineGroupInfo, engine_group_ids_per_view
/// >>> engine_group_ids_per_view([EngineGroupInfo(0), EngineGroupInfo(2), EngineGroupInfo(0)])
/// (0, 2, 0)
/// >>> engine_group_ids_per_view([])
/// (0,)
#[pyfunction]
pub fn engine_group_ids_per_view<'py>(groups: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
    let py = groups.py();
    let groups = each_group(groups)?;
    if groups.is_empty() {
        return PyTuple::new(py, [0]);
    }
    let as_index = py.import(intern!(py, "operator"))?.getattr(intern!(py, "index"))?;
    let id_of = |group: &Bound<'py, PyAny>| {
        let id = attribute(group, "engine_group_id")?;
        as_index
            .call1((&id,))
            .map_err(|error| refused(error, &id, || wrong("engine_group_id", &id, "an integer")))
    };
    PyTuple::new(py, groups.iter().map(id_of).collect::<PyResult<Vec<_>>>()?)
}

/// Layers of each engine group: one sorted list for each id, a hole's empty, none without groups.
///
/// Parameters
/// ----------
/// groups
///     KV groups in protocol order; anything with the attributes of `EngineGroupInfo`.
///
/// Returns
/// -------
/// list of list of int
///     A layer that several KV groups name comes as often.
///
/// Raises
/// ------
/// ValueError
///     An engine group id is outside ``[0, 65536)``, or there are more than 2^20 layers.
///
/// Examples
/// --------
/// >>> from kvferry.groups import EngineGroupInfo, engine_group_layer_indices
/// >>> groups = [EngineGroupInfo(0, (4, 0)), EngineGroupInfo(2, (1, 3)), EngineGroupInfo(0, (2,))]
/// >>> engine_group_layer_indices(groups)
/// [[0, 2, 4], [], [1, 3]]
#[pyfunction]
pub fn engine_group_layer_indices(groups: &Bound<'_, PyAny>) -> PyResult<Vec<Vec<i64>>> {
    let no_layer = |layer: &Bound<'_, PyAny>, group: usize| {
        let layer = shown(layer);
        to_py(Error::BlockRange(format!("layer {layer} of engine group {group} is outside [-2^63, 2^63)")))
    };
    Ok(groups::engine_group_layers(&kv_groups(groups, no_layer)?))
}

/// Engine group id of each registered layer.
///
/// Parameters
/// ----------
/// groups
///     KV groups in protocol order; anything with the attributes of `EngineGroupInfo`.
/// num_registered_layers
///     Layers whose caches are registered, at most 2^20.
/// strict
///     Refuse a layer that two engine groups claim, which else goes to the last.
///
/// Returns
/// -------
/// list of int, or None
///     `EXCLUDED_ENGINE_GROUP` for a layer that no group names; `None` where there are no groups or
///     no layers.
///
/// Raises
/// ------
/// BlockRangeError
///     A group names a layer that is not registered.
/// OverlapError
///     With `strict`: two engine groups claim one layer.
/// ValueError
///     A number is negative, or too large to make sense.
///
/// Examples
/// --------
/// >>> from kvferry.groups import EngineGroupInfo, get_engine_group_indices
/// >>> get_engine_group_indices([EngineGroupInfo(0, (0, 3)), EngineGroupInfo(1, (1,))], 4)
/// [0, 1, -1, 0]
#[pyfunction]
#[pyo3(signature = (groups, num_registered_layers, *, strict=false))]
pub fn get_engine_group_indices(
    groups: &Bound<'_, PyAny>,
    num_registered_layers: &Bound<'_, PyAny>,
    strict: bool,
) -> PyResult<Option<Vec<i64>>> {
    let num_layers = index("num_registered_layers", num_registered_layers)?;
    let no_layer =
        |layer: &Bound<'_, PyAny>, group| to_py(groups::outside_layers(shown(layer), group, num_layers));
    if num_layers == 0 {
        return engine_groups(groups).map(|_| None);
    }
    let groups = kv_groups(groups, no_layer)?;
    groups::engine_group_of_layers(&groups, num_layers, strict).or_raise()
}

/// Block ids in the order of KV groups instead of engine groups.
///
/// Parameters
/// ----------
/// groups
///     KV groups in protocol order; anything with an ``engine_group_id``.
/// engine_side_block_ids
///     One list or integer array of block ids for each engine group, or a two-dimensional array with
///     a row for each. Where there is one engine group, its ids may be given flat.
/// strict
///     Refuse more lists than there are engine groups, which else are ignored.
///
/// Returns
/// -------
/// list
///     Ids of each KV group: a list of its own where they are a list, tuple, range or other sequence,
///     a view of an array.
///
/// Raises
/// ------
/// BlockRangeError
///     There are fewer lists than engine groups, ids are flat where there are several engine groups,
///     or, with `strict`, there are more lists.
/// ValueError
///     An engine group id is outside ``[0, 65536)``, or an array is not one of integers.
///
/// Examples
/// --------
/// >>> from kvferry.groups import EngineGroupInfo, expand_engine_block_ids
/// >>> groups = [EngineGroupInfo(1), EngineGroupInfo(0), EngineGroupInfo(1)]
/// >>> expand_engine_block_ids(groups, [[7, 8], (3,)])
/// [[3], [7, 8], [3]]
/// >>> expand_engine_block_ids([], range(3))
/// [[0, 1, 2]]
#[pyfunction]
#[pyo3(signature = (groups, engine_side_block_ids, *, strict=false))]
pub fn expand_engine_block_ids<'py>(
    groups: &Bound<'py, PyAny>,
    engine_side_block_ids: &Bound<'py, PyAny>,
    strict: bool,
) -> PyResult<Bound<'py, PyList>> {
    const FIELD: &str = "engine_side_block_ids";
    let mut views = engine_groups(groups)?;
    let num_groups = groups::num_engine_groups(views.iter().copied());
    if views.is_empty() {
        views.push(0);
    }
    let is_flat =
        is_flat(FIELD, engine_side_block_ids)? || num_groups == 1 && engine_side_block_ids.len()? == 0;
    if is_flat && num_groups > 1 {
        let message =
            format!("{FIELD} is one flat list of block ids for {}", counted(num_groups, "engine group"));
        return Err(to_py(Error::BlockRange(message)));
    }
    let lists: Vec<_> = if is_flat {
        vec![engine_side_block_ids.clone()]
    } else {
        // One more than there are groups is enough to see that there are too many.
        engine_side_block_ids.try_iter()?.take(num_groups + 1).collect::<PyResult<_>>()?
    };
    let has_surplus = lists.len() > num_groups;
    if lists.len() < num_groups || strict && has_surplus {
        let held = if has_surplus { "more lists".into() } else { counted(lists.len(), "list") };
        let message = format!("{FIELD} holds {held} for {}", counted(num_groups, "engine group"));
        return Err(to_py(Error::BlockRange(message)));
    }
    let ids_of = |&group: &usize| {
        let ids = BlockIds::new(FIELD, group, lists[group].clone())?;
        ids.cut(0, ids.len()?)
    };
    PyList::new(groups.py(), views.iter().map(ids_of).collect::<PyResult<Vec<_>>>()?)
}

/// Block ids of each engine group that cover a token range.
///
/// Element ``i`` of a group's ids covers the tokens from ``i * tokens_per_block``, so that the same
/// range takes more ids in a group of smaller blocks.
///
/// Parameters
/// ----------
/// allocated_block_ids
///     Maps an engine group id to the group's list or integer array of block ids. A group that is
///     missing holds none.
/// group_tokens_per_block
///     Tokens that one block id covers, for each engine group.
/// start_token_idx, end_token_idx
///     Token positions ``[start, end)``, both on a block boundary of every group. A range that ends
///     before it starts covers nothing.
/// strict
///     Refuse a group that holds fewer ids than the range needs, which else gives a shorter list, and
///     ids of a group without tokens per block, which else are ignored.
///
/// Returns
/// -------
/// list
///     Ids of each engine group: a list of its own where they are a list, tuple, range or other
///     sequence, a view of an array.
///
/// Raises
/// ------
/// AlignmentError
///     The range does not align to a group's blocks.
/// BlockRangeError
///     With `strict`: too few ids, or a group that does not exist.
/// ValueError
///     A token position is negative, a group has no tokens per block, or an array is not one of
///     integers.
///
/// Examples
/// --------
/// >>> from kvferry.groups import slice_block_ids_per_group
/// >>> allocated = {0: [7, 4, 9, 1], 1: [20, 21]}
/// >>> slice_block_ids_per_group(allocated, [64, 256], 0, 256)
/// [[7, 4, 9, 1], [20]]
/// >>> slice_block_ids_per_group(allocated, [64, 256], 0, 512, strict=True)
/// Traceback (most recent call last):
///     ...
/// kvferry.errors.BlockRangeError: group 0 needs 8 block ids for token range [0, 512), held 4
#[pyfunction]
#[pyo3(signature = (allocated_block_ids, group_tokens_per_block, start_token_idx, end_token_idx, *, strict=false))]
pub fn slice_block_ids_per_group<'py>(
    allocated_block_ids: &Bound<'py, PyAny>,
    group_tokens_per_block: &Bound<'py, PyAny>,
    start_token_idx: &Bound<'py, PyAny>,
    end_token_idx: &Bound<'py, PyAny>,
    strict: bool,
) -> PyResult<Bound<'py, PyList>> {
    const FIELD: &str = "allocated_block_ids";
    let py = allocated_block_ids.py();
    let Ok(allocated) = allocated_block_ids.cast::<PyMapping>() else {
        return Err(wrong(FIELD, allocated_block_ids, "a mapping from engine group id to block ids"));
    };
    let tokens =
        Interval::new(natural("start_token_idx", start_token_idx)?, natural("end_token_idx", end_token_idx)?);
    let needed = ids_needed(group_tokens_per_block, tokens)?;
    if strict {
        refuse_surplus(allocated, needed.len())?;
    }
    let ids_of = |(group, &needed): (usize, &Interval)| {
        let Some(ids) = held_ids(allocated, group)? else {
            groups::held_of_needed(group, tokens, needed, 0, strict).or_raise()?;
            return Ok(PyList::empty(py).into_any());
        };
        let ids = BlockIds::new(FIELD, group, ids)?;
        let held = groups::held_of_needed(group, tokens, needed, ids.len()? as u64, strict).or_raise()?;
        ids.cut(to_index(held.begin), to_index(held.end))
    };
    PyList::new(py, needed.iter().enumerate().map(ids_of).collect::<PyResult<Vec<_>>>()?)
}

/// Which elements of each group's list cover the tokens.
fn ids_needed(tokens_per_block: &Bound<'_, PyAny>, tokens: Interval) -> PyResult<Vec<Interval>> {
    const FIELD: &str = "group_tokens_per_block";
    let sizes = bounded(items(FIELD, tokens_per_block, "a sequence of integers")?, FIELD)?;
    let needed = |(group, size): (usize, &Bound<'_, PyAny>)| {
        let tokens_per_block = natural(&format!("{FIELD}[{group}]"), size)?;
        groups::ids_of_tokens(group, tokens, tokens_per_block).or_raise()
    };
    sizes.iter().enumerate().map(needed).collect()
}

/// The ids of one group as they are, if there are any.
fn held_ids<'py>(allocated: &Bound<'py, PyMapping>, group: usize) -> PyResult<Option<Bound<'py, PyAny>>> {
    if let Ok(dict) = allocated.cast_exact::<PyDict>() {
        return dict.get_item(group);
    }
    // Asked by `get`, a `defaultdict` makes no entry of its own.
    let missing = PyTuple::empty(allocated.py());
    let ids = allocated.call_method1(intern!(allocated.py(), "get"), (group, &missing))?;
    Ok(if ids.is(&missing) { None } else { Some(ids) })
}

fn refuse_surplus(allocated: &Bound<'_, PyMapping>, num_groups: usize) -> PyResult<()> {
    for key in allocated.try_iter()? {
        let key = key?;
        if !key.extract::<usize>().is_ok_and(|group| group < num_groups) {
            let key = shown(&key);
            let message = format!("allocated_block_ids holds ids of group {key}, outside [0, {num_groups})");
            return Err(to_py(Error::BlockRange(message)));
        }
    }
    Ok(())
}

/// The KV groups themselves.
fn each_group<'py>(groups: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    bounded(items("groups", groups, "a sequence of EngineGroupInfo")?, "groups")
}

/// The checked engine group id of each KV group.
fn engine_groups(groups: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    each_group(groups)?.iter().map(engine_group).collect()
}

fn engine_group(group: &Bound<'_, PyAny>) -> PyResult<usize> {
    let id = attribute(group, "engine_group_id")?;
    match id.extract::<i64>() {
        Ok(id) => groups::engine_group(id).or_raise(),
        Err(error) => Err(refused(error, &id, || {
            wrong("engine_group_id", &id, &format!("an integer in [0, {MAX_ENGINE_GROUPS})"))
        })),
    }
}

/// KV groups with their layers; `no_layer` is the error of a layer of a group that no 64 bits can hold.
fn kv_groups(
    groups: &Bound<'_, PyAny>,
    no_layer: impl Fn(&Bound<'_, PyAny>, usize) -> PyErr,
) -> PyResult<Vec<KvGroup>> {
    let mut num_layers = 0;
    let read = |group: &Bound<'_, PyAny>| {
        let engine_group = engine_group(group)?;
        let mut layers = Vec::new();
        for layer in items("layer_indices", &attribute(group, "layer_indices")?, "a sequence of integers")? {
            let layer = layer?;
            num_layers += 1;
            if num_layers > MAX_LAYERS {
                let message = format!("groups name more than {MAX_LAYERS} layers");
                return Err(PyValueError::new_err(message));
            }
            layers.push(match layer.extract() {
                Ok(layer) => layer,
                Err(_) if layer.is_instance_of::<PyInt>() => return Err(no_layer(&layer, engine_group)),
                Err(error) => {
                    return Err(refused(error, &layer, || wrong("layer_indices", &layer, "an integer")));
                }
            });
        }
        Ok(KvGroup { engine_group, layers })
    };
    each_group(groups)?.iter().map(read).collect()
}

fn attribute<'py>(group: &Bound<'py, PyAny>, name: &str) -> PyResult<Bound<'py, PyAny>> {
    group
        .getattr(name)
        .map_err(|error| refused(error, group, || wrong("groups", group, &format!("a group with {name}"))))
}

/// No more entries than there can be engine groups.
fn bounded<'py>(
    entries: impl Iterator<Item = PyResult<Bound<'py, PyAny>>>,
    field: &str,
) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let entries: Vec<_> = entries.take(MAX_ENGINE_GROUPS + 1).collect::<PyResult<_>>()?;
    if entries.len() > MAX_ENGINE_GROUPS {
        return Err(PyValueError::new_err(format!("{field} holds more than {MAX_ENGINE_GROUPS} entries")));
    }
    Ok(entries)
}

/// At most the length of a list, which fits.
fn to_index(number: u64) -> usize {
    usize::try_from(number).unwrap_or(usize::MAX)
}
