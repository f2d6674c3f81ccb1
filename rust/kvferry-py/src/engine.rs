//! `kvferry.specs` structs as the core's engines, and the tensor slots of a rank.

use std::sync::Arc;

use kvferry_core::interval::Interval;
use kvferry_core::specs::dtype::Dtype;
use kvferry_core::specs::engine::{self, EngineFields, PerGroup};
use kvferry_core::specs::layout::Layout;
use kvferry_core::specs::model::{self, Attention, Group, GroupKind, Latent, StatePart};
use kvferry_core::specs::slot;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyString, PyTuple};

use crate::args::{FAR_NULL_BLOCK, index, interval, natural, per_group, refused, shown, wrong};
use crate::errors::OrRaise;

/// The canonical axis letters of a layout string.
#[pyfunction]
pub fn canonical_layout(text: &str) -> PyResult<String> {
    Ok(Layout::parse(text).or_raise()?.to_string())
}

/// Raises `ValueError` where a group spec makes no sense.
#[pyfunction]
pub fn check_group(group: &Bound<'_, PyAny>) -> PyResult<()> {
    read_group(group).map(drop)
}

/// Raises `ValueError` where a model's groups contradict each other.
#[pyfunction]
pub fn check_model(model: &Bound<'_, PyAny>) -> PyResult<()> {
    model::check_model(&read_groups(model)?).or_raise()
}

/// A checked engine; made by `EngineSpec` for itself.
#[pyclass(frozen, module = "kvferry._core")]
pub struct Engine {
    /// Shared with the caches and routes made from it.
    pub inner: Arc<engine::Engine>,
}

#[pymethods]
impl Engine {
    #[new]
    fn new(spec: &Bound<'_, PyAny>) -> PyResult<Self> {
        let inner = engine::Engine::new(&read_engine(spec)?).or_raise()?;
        Ok(Self { inner: Arc::new(inner) })
    }

    /// Global ranks.
    #[getter]
    fn num_ranks(&self) -> usize {
        self.inner.num_ranks()
    }

    /// The tensors that a rank registers, in registration order.
    fn tensor_slots<'py>(&self, py: Python<'py>, rank: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
        let slots = self.inner.slots(index("rank", rank)?).or_raise()?;
        PyTuple::new(py, slots.into_iter().map(|inner| TensorSlot { inner }))
    }
}

/// Reads the core's engine out of a Python `EngineSpec`.
pub fn engine_of(spec: &Bound<'_, PyAny>) -> PyResult<Arc<engine::Engine>> {
    let core = spec.getattr("_checked").ok().and_then(|core| core.cast_into::<Engine>().ok());
    match core {
        Some(core) => Ok(Arc::clone(&core.get().inner)),
        None => Err(PyTypeError::new_err(format!("expected an EngineSpec, got {}", shown(spec)))),
    }
}

/// One tensor that a rank registers.
///
/// Attributes
/// ----------
/// name
///     Unique on its rank.
/// group
///     Index of its group in the engine's model.
/// layers
///     Layers that it holds, ascending.
/// planes
///     ``("K", "V")``, ``("K",)``, ``("V",)``, ``("latent",)``, or the name of a state part.
/// layout
///     Axis letters in memory order; ``"BS"`` for a state part.
/// item_bytes
///     Bytes of one tensor item.
#[pyclass(frozen, module = "kvferry._core")]
pub struct TensorSlot {
    inner: slot::TensorSlot,
}

#[pymethods]
impl TensorSlot {
    #[getter]
    fn name(&self) -> &str {
        &self.inner.name
    }

    #[getter]
    fn group(&self) -> usize {
        self.inner.group
    }

    #[getter]
    fn layers<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.inner.layers)
    }

    #[getter]
    fn planes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.inner.planes)
    }

    #[getter]
    fn layout(&self) -> String {
        self.inner.layout.to_string()
    }

    #[getter]
    fn item_bytes(&self) -> u64 {
        self.inner.item_bytes
    }

    /// Items along each axis of the layout, with room for `num_blocks` tensor blocks.
    ///
    /// Examples
    /// --------
    /// >>> from kvferry import AttentionGroup, EngineSpec, ModelSpec
    /// >>> model = ModelSpec((AttentionGroup(layers=(0,), num_kv_heads=8, head_dim=128),))
    /// >>> engine = EngineSpec("a", model, tokens_per_block=16, layout="BHNC", tp_size=2)
    /// >>> engine.tensor_slots(0)[0].shape(num_blocks=1000)
    /// (1000, 4, 16, 256)
    fn shape<'py>(&self, py: Python<'py>, num_blocks: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
        let mut sizes = self.inner.sizes.clone();
        sizes[self.inner.block_axis()] = natural("num_blocks", num_blocks)?;
        PyTuple::new(py, sizes)
    }

    fn __repr__(&self) -> String {
        let slot::TensorSlot { name, group, layers, planes, layout, .. } = &self.inner;
        format!(
            "TensorSlot(name={name:?}, group={group}, layers={layers:?}, planes={planes:?}, layout=\"{layout}\")"
        )
    }
}

fn read_engine(spec: &Bound<'_, PyAny>) -> PyResult<EngineFields> {
    let field = |name: &str| spec.getattr(name);
    let size = |name: &str| index(name, &field(name)?);
    let naturals = |name: &'static str| per_group(&field(name)?, |value| natural(name, value));
    Ok(EngineFields {
        engine_id: text("engine_id", &field("engine_id")?)?,
        groups: read_groups(&field("model")?)?,
        tokens_per_block: naturals("tokens_per_block")?,
        layout: per_group(&field("layout")?, |value| text("layout", value))?,
        tp_size: size("tp_size")?,
        pp_size: size("pp_size")?,
        cp_size: size("cp_size")?,
        cp_interleave: natural("cp_interleave", &field("cp_interleave")?)?,
        pp_layers: optional(&field("pp_layers")?, |value| intervals("pp_layers", value))?,
        head_ranges: read_head_ranges(&field("head_ranges")?)?,
        null_block_id: per_group(&field("null_block_id")?, |value| optional(value, null_block_id))?,
        physical_blocks_per_block: naturals("physical_blocks_per_block")?,
        num_blocks: per_group(&field("num_blocks")?, |value| {
            optional(value, |value| natural("num_blocks", value))
        })?,
    })
}

/// One split for all groups is a tuple of `(start, end)`; else each entry is a split or `None`.
fn read_head_ranges(value: &Bound<'_, PyAny>) -> PyResult<PerGroup<Option<Vec<Interval>>>> {
    if value.is_none() {
        return Ok(PerGroup::Same(None));
    }
    let entries = tuple("head_ranges", value, "a tuple of (start, end)")?;
    let is_split = |entry: &Bound<'_, PyAny>| entry.get_item(0).is_ok_and(|end| end.try_iter().is_err());
    if entries.iter().all(|entry| is_split(&entry)) {
        return Ok(PerGroup::Same(Some(intervals("head_ranges", value)?)));
    }
    per_group(value, |split| optional(split, |split| intervals("head_ranges", split)))
}

fn read_groups(model: &Bound<'_, PyAny>) -> PyResult<Vec<Group>> {
    let Ok(groups) = model.getattr("groups") else {
        return Err(wrong("model", model, "a ModelSpec"));
    };
    tuple("groups", &groups, "a tuple of groups")?.iter().map(|group| read_group(&group)).collect()
}

fn read_group(group: &Bound<'_, PyAny>) -> PyResult<Group> {
    let field = |name: &str| group.getattr(name);
    let number = |name: &str| natural(name, &field(name)?);
    let dtype = || Dtype::parse(&text("dtype", &field("dtype")?)?).or_raise();
    let kind = if group.hasattr("num_kv_heads")? {
        let head_dim = number("head_dim")?;
        let v_head_dim = optional(&field("v_head_dim")?, |value| natural("v_head_dim", value))?;
        GroupKind::Attention(Attention {
            num_kv_heads: number("num_kv_heads")?,
            head_dims: [head_dim, v_head_dim.unwrap_or(head_dim)],
            dtype: dtype()?,
            sliding_window: sliding_window(&field("sliding_window")?)?,
            tokens_per_slot: number("tokens_per_slot")?,
        })
    } else if group.hasattr("latent_dim")? {
        GroupKind::Latent(Latent {
            latent_dim: number("latent_dim")?,
            dtype: dtype()?,
            tokens_per_slot: number("tokens_per_slot")?,
        })
    } else if group.hasattr("parts")? {
        let parts = field("parts")?;
        let parts = tuple("parts", &parts, "a tuple of StateParts")?.iter();
        GroupKind::State(parts.map(|part| read_part(&part)).collect::<PyResult<_>>()?)
    } else {
        return Err(wrong("groups", group, "an AttentionGroup, LatentGroup or StateGroup"));
    };
    Group::new(naturals("layers", &field("layers")?)?, kind).or_raise()
}

fn read_part(part: &Bound<'_, PyAny>) -> PyResult<StatePart> {
    if !part.hasattr("shard_axis")? {
        return Err(wrong("parts", part, "a StatePart"));
    }
    let field = |name: &str| part.getattr(name);
    let shape = naturals("shape", &field("shape")?)?;
    let units = optional(&field("shard_units")?, |value| natural("shard_units", value))?;
    let axis = optional(&field("shard_axis")?, |value| index("shard_axis", value))?;
    let shard = axis.map(|axis| (axis, units.unwrap_or_else(|| shape.get(axis).copied().unwrap_or(1))));
    if shard.is_none() && units.is_some() {
        return Err(PyValueError::new_err("shard_units is given, but shard_axis is None"));
    }
    let dtype = Dtype::parse(&text("dtype", &field("dtype")?)?).or_raise()?;
    Ok(StatePart { name: text("name", &field("name")?)?, shape, dtype, shard })
}

/// `-1` is full attention; everything else must be a window.
fn sliding_window(value: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    match value.extract::<i64>() {
        Ok(-1) => Ok(None),
        Ok(window @ 1..) => Ok(Some(window.unsigned_abs())),
        Ok(_) => Err(wrong("sliding_window", value, "-1 or positive")),
        Err(error) => Err(refused(error, value, || wrong("sliding_window", value, "an integer"))),
    }
}

/// Any integer; one that is no 64-bit number is known by its stand-in.
fn null_block_id(value: &Bound<'_, PyAny>) -> PyResult<i64> {
    match value.extract() {
        Ok(id) => Ok(id),
        Err(_) if value.is_instance_of::<PyInt>() => Ok(FAR_NULL_BLOCK),
        Err(error) => Err(refused(error, value, || wrong("null_block_id", value, "an integer"))),
    }
}

fn optional<'py, T>(
    value: &Bound<'py, PyAny>,
    some: impl FnOnce(&Bound<'py, PyAny>) -> PyResult<T>,
) -> PyResult<Option<T>> {
    if value.is_none() { Ok(None) } else { some(value).map(Some) }
}

fn text(field: &str, value: &Bound<'_, PyAny>) -> PyResult<String> {
    match value.cast::<PyString>() {
        Ok(text) => Ok(text.to_str()?.to_owned()),
        Err(_) => Err(wrong(field, value, "a string")),
    }
}

/// Specs keep tuples, so that they stay what was checked.
fn tuple<'a, 'py>(
    field: &str,
    value: &'a Bound<'py, PyAny>,
    what: &str,
) -> PyResult<&'a Bound<'py, PyTuple>> {
    value.cast().map_err(|_| wrong(field, value, what))
}

fn naturals(field: &str, values: &Bound<'_, PyAny>) -> PyResult<Vec<u64>> {
    tuple(field, values, "a tuple of integers")?.iter().map(|value| natural(field, &value)).collect()
}

fn intervals(field: &str, values: &Bound<'_, PyAny>) -> PyResult<Vec<Interval>> {
    tuple(field, values, "a tuple of (start, end)")?.iter().map(|value| interval(field, &value)).collect()
}
