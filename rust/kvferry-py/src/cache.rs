//! `KVCache`: one rank's registered tensors.

use std::collections::HashSet;
use std::sync::Arc;

use kvferry_core::memory::cache::RankCache;
use kvferry_core::memory::tensor::{Device, RawTensor};
use kvferry_core::specs::engine::PerGroup;
use kvferry_core::specs::slot::TensorSlot;
use kvferry_core::{Error, counted};
use kvferry_cuda::Memory;
use pyo3::exceptions::{PyKeyError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyMapping, PySequence, PyString, PyTuple};

use crate::args::{index, items, natural, per_group, refused, shown, wrong};
use crate::dlpack::{self, MAX_DIMENSIONS, ManagedTensor};
use crate::engine::engine_of;
use crate::errors::{OrRaise, to_py};

/// The registered cache tensors of one rank.
///
/// Parameters
/// ----------
/// engine
///     The engine whose rank it is.
/// rank
///     Global rank in ``[0, engine.num_ranks)``.
/// tensors
///     Anything that speaks DLPack (torch, numpy, …) in host or CUDA memory: a sequence in the order of
///     ``engine.tensor_slots(rank)``, or a mapping from slot name. Nothing is copied, and each
///     tensor's memory stays alive as long as this object; the producer must not move, shrink or unpin
///     it meanwhile (torch's ``resize_`` of a storage moves it).
/// axes
///     Axis letters of the tensors' dimensions in the order in which they are handed over, where that
///     is not memory order: one string, or a tuple with one entry a group.
///
/// Raises
/// ------
/// LayoutError
///     A tensor's shape, strides, item size or device contradicts the engine's layout.
/// BlockRangeError
///     A mapping names a slot that does not exist.
///
/// Examples
/// --------
/// >>> import numpy as np
/// >>> from kvferry import AttentionGroup, EngineSpec, KVCache, ModelSpec
/// >>> model = ModelSpec((AttentionGroup(layers=(0,), num_kv_heads=2, head_dim=8, dtype="float16"),))
/// >>> engine = EngineSpec("a", model, tokens_per_block=4, layout="BNHC")
/// >>> memory = np.zeros((10, 4, 2, 16), np.float16)  # [blocks, tokens, heads, key then value]
/// >>> KVCache(engine, 0, [memory])
/// KVCache(engine='a', rank=0, tensors=1)
/// >>> view = memory.transpose(0, 2, 1, 3)  # handed over as [blocks, heads, tokens, content]
/// >>> KVCache(engine, 0, {"layers.0": view}, axes="BHNC").describe().slots[0].sizes
/// (10, 4, 2, 16)
#[pyclass(frozen, module = "kvferry._core")]
pub struct KVCache {
    /// Addresses and strides, checked.
    pub inner: Arc<RankCache>,
    /// What the CUDA driver has said of the tensors' memory.
    pub memory: Arc<Memory>,
    engine: Py<PyAny>,
    /// Keeps the memory alive.
    _tensors: Vec<ManagedTensor>,
}

#[pymethods]
impl KVCache {
    #[new]
    #[pyo3(signature = (engine, rank, tensors, *, axes=None))]
    fn new(
        engine: &Bound<'_, PyAny>,
        rank: &Bound<'_, PyAny>,
        tensors: &Bound<'_, PyAny>,
        axes: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let core = engine_of(engine)?;
        let rank = index("rank", rank)?;
        let slots = core.slots(rank).or_raise()?;
        let axes = read_axes(axes, core.groups.len())?;
        let mut managed = Vec::with_capacity(slots.len());
        let mut raw = Vec::with_capacity(slots.len());
        for (name, tensor) in in_slot_order(&core.id, rank, &slots, tensors)? {
            let (owned, described) = dlpack::import(&name, &tensor)?;
            managed.push(owned);
            raw.push(described);
        }
        let inner = Arc::new(RankCache::new(core, rank, &raw, &axes).or_raise()?);
        let engine = engine.clone().unbind();
        Ok(Self { inner, memory: Arc::default(), engine, _tensors: managed })
    }

    /// The engine whose rank it is.
    #[getter]
    fn engine(&self, py: Python<'_>) -> Py<PyAny> {
        self.engine.clone_ref(py)
    }

    /// Global rank.
    #[getter]
    fn rank(&self) -> usize {
        self.inner.rank
    }

    /// What a peer must know of these tensors: a `RankDescription`.
    fn describe<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let module = py.import("kvferry.cache")?;
        let slot_class = module.getattr("SlotDescription")?;
        let describe = |(slot, tensor): (&TensorSlot, &kvferry_core::memory::tensor::Tensor)| {
            slot_class.call1((
                &slot.name,
                tensor.address,
                PyTuple::new(py, &tensor.sizes)?,
                PyTuple::new(py, &tensor.strides)?,
                slot.item_bytes,
                (tensor.device.kind, tensor.device.index),
                tensor.writable,
            ))
        };
        let slots = self.inner.slots.iter().zip(&self.inner.tensors).map(describe);
        let slots = PyTuple::new(py, slots.collect::<PyResult<Vec<_>>>()?)?;
        module.getattr("RankDescription")?.call1((&self.inner.engine.id, self.inner.rank, slots))
    }

    fn __repr__(&self) -> String {
        let RankCache { engine, rank, tensors, .. } = &*self.inner;
        format!("KVCache(engine='{}', rank={rank}, tensors={})", engine.id, tensors.len())
    }
}

/// Pairs each slot's name with its tensor.
fn in_slot_order<'py>(
    engine: &str,
    rank: usize,
    slots: &[TensorSlot],
    tensors: &Bound<'py, PyAny>,
) -> PyResult<Vec<(String, Bound<'py, PyAny>)>> {
    if let Ok(by_name) = tensors.cast::<PyMapping>() {
        let known: HashSet<&str> = slots.iter().map(|slot| slot.name.as_str()).collect();
        for name in by_name.keys()? {
            let text = name.cast::<PyString>().ok().and_then(|name| name.to_str().ok());
            if !text.is_some_and(|name| known.contains(name)) {
                let example =
                    slots.first().map_or_else(String::new, |slot| format!(", but such as {:?}", slot.name));
                return Err(to_py(Error::BlockRange(format!(
                    "rank {rank} of engine {engine:?} has no tensor slot {}{example}",
                    shown(&name)
                ))));
            }
        }
        let tensor = |slot: &TensorSlot| match by_name.get_item(&slot.name) {
            Ok(tensor) => Ok((slot.name.clone(), tensor)),
            Err(error) if error.is_instance_of::<PyKeyError>(tensors.py()) => {
                Err(to_py(Error::Layout(format!("tensor slot {:?} is not given", slot.name))))
            }
            Err(error) => Err(error),
        };
        return slots.iter().map(tensor).collect();
    }
    let Ok(sequence) = tensors.cast::<PySequence>() else {
        let hint = if tensors.hasattr("__dlpack__")? { "; pass [tensor] where there is but one" } else { "" };
        return Err(PyTypeError::new_err(format!(
            "tensors must be a sequence in slot order or a mapping from slot name, got {}{hint}",
            tensors.get_type()
        )));
    };
    if sequence.len()? != slots.len() {
        return Err(to_py(Error::Layout(format!(
            "expected {}, one a slot, got {}",
            counted(slots.len(), "tensor"),
            sequence.len()?
        ))));
    }
    let tensors = sequence.try_iter()?;
    slots.iter().zip(tensors).map(|(slot, tensor)| Ok((slot.name.clone(), tensor?))).collect()
}

fn read_axes(axes: Option<&Bound<'_, PyAny>>, groups: usize) -> PyResult<Vec<Option<String>>> {
    let Some(axes) = axes else {
        return Ok(vec![None; groups]);
    };
    let one = |value: &Bound<'_, PyAny>| {
        if value.is_none() {
            return Ok(None);
        }
        value.extract::<String>().map(Some).map_err(|_| {
            PyValueError::new_err(format!("axes={} is not a string of axis letters", shown(value)))
        })
    };
    match per_group(axes, one)? {
        PerGroup::Same(one) => Ok(vec![one; groups]),
        PerGroup::Each(each) if each.len() == groups => Ok(each),
        PerGroup::Each(each) => {
            let (given, groups) = (counted(each.len(), "value"), counted(groups, "group"));
            Err(PyValueError::new_err(format!("axes has {given} for {groups}")))
        }
    }
}

/// One end of a transfer: a `KVCache` of this process, or a peer's `RankDescription`.
pub struct End {
    /// Addresses and strides, checked.
    pub cache: Arc<RankCache>,
    /// Whether its memory is this process's own.
    pub is_local: bool,
}

impl End {
    /// Reads one end whose engine the route knows as `engine`.
    pub fn read(engine: &Arc<kvferry_core::specs::engine::Engine>, end: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(cache) = end.cast::<KVCache>() {
            return Ok(Self { cache: Arc::clone(&cache.get().inner), is_local: true });
        }
        if !end.hasattr("slots")? || !end.hasattr("engine_id")? {
            return Err(PyTypeError::new_err(format!(
                "expected a KVCache or a RankDescription, got {}",
                end.get_type()
            )));
        }
        let id = end.getattr("engine_id")?;
        if !id.eq(&engine.id)? {
            return Err(PyValueError::new_err(format!(
                "the description is of engine {}, the route has {:?} there",
                shown(&id),
                engine.id
            )));
        }
        let rank = index("rank", &end.getattr("rank")?)?;
        let slots = engine.slots(rank).or_raise()?;
        let given = end.getattr("slots")?;
        let given = items("slots", &given, "a tuple of SlotDescriptions")?.take(slots.len() + 1);
        let given = given.collect::<PyResult<Vec<_>>>()?;
        let tensors = given
            .iter()
            .enumerate()
            .map(|(position, slot)| read_slot(slots.get(position).map(|slot| slot.name.as_str()), slot))
            .collect::<PyResult<Vec<_>>>()?;
        let cache = RankCache::new(Arc::clone(engine), rank, &tensors, &[]).or_raise()?;
        Ok(Self { cache: Arc::new(cache), is_local: false })
    }

    /// Reads one end or several.
    pub fn read_all(
        engine: &Arc<kvferry_core::specs::engine::Engine>,
        ends: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Vec<Self>> {
        let Some(ends) = ends else { return Ok(Vec::new()) };
        match ends.cast::<PySequence>() {
            Ok(several) => several.try_iter()?.map(|end| Self::read(engine, &end?)).collect(),
            Err(_) => Ok(vec![Self::read(engine, ends)?]),
        }
    }
}

/// Reads one tensor of a description, which must be the slot that this engine has at its place.
fn read_slot(expected: Option<&str>, slot: &Bound<'_, PyAny>) -> PyResult<RawTensor> {
    let field = |name: &str| {
        slot.getattr(name)
            .map_err(|error| refused(error, slot, || wrong("slots", slot, "a tuple of SlotDescriptions")))
    };
    let name = field("name")?;
    if expected.is_some_and(|expected| !name.eq(expected).unwrap_or(false)) {
        return Err(to_py(Error::Layout(format!(
            "the description has tensor {} where the engine has {:?}",
            shown(&name),
            expected.unwrap_or_default()
        ))));
    }
    let integers = |field: &str, values: &Bound<'_, PyAny>| {
        let integer = |value: Bound<'_, PyAny>| {
            value.extract::<i64>().map_err(|error| {
                refused(error, &value, || wrong(field, &value, "an integer in [-2^63, 2^63)"))
            })
        };
        items(field, values, "a tuple of integers")?
            .take(MAX_DIMENSIONS + 1)
            .map(|value| integer(value?))
            .collect::<PyResult<Vec<_>>>()
    };
    let device = field("device")?;
    let (kind, index) = device.extract::<(i32, i32)>().map_err(|error| {
        refused(error, &device, || wrong("device", &device, "a DLPack device type and index"))
    })?;
    let writable = field("writable")?;
    Ok(RawTensor {
        address: natural("address", &field("address")?)?,
        shape: integers("sizes", &field("sizes")?)?,
        strides: integers("strides", &field("strides")?)?,
        item_bytes: natural("item_bytes", &field("item_bytes")?)?,
        device: Device { kind, index },
        writable: writable
            .extract()
            .map_err(|error| refused(error, &writable, || wrong("writable", &writable, "a bool")))?,
    })
}
