//! `Route`: a pair of engines that has been checked.

use std::sync::Arc;

use kvferry_core::planning::plan;
use kvferry_core::planning::plan::RequestBlocks;
use kvferry_core::planning::route;
use kvferry_core::side::Side;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::args::{block_lists, first_tokens, index, interval};
use crate::engine::engine_of;
use crate::errors::OrRaise;
use crate::plan::Plan;

/// Two engines that can exchange caches, with everything worked out that no request changes.
///
/// Parameters
/// ----------
/// source
///     The engine that is read.
/// target
///     The engine that is written. The two may differ in sharding, tokens per block, layout and groups.
/// allow_missing_layers
///     Leave out layers that only one side has, instead of refusing the pair.
///
/// Raises
/// ------
/// IncompatibleEnginesError
///     The two can never exchange caches: heads, sizes, dtype, window or layers differ.
///
/// Examples
/// --------
/// >>> from kvferry import AttentionGroup, EngineSpec, ModelSpec, Route
/// >>> model = ModelSpec((AttentionGroup(layers=range(2), num_kv_heads=6, head_dim=64),))
/// >>> prefill = EngineSpec("prefill", model, tokens_per_block=16, layout="HND", tp_size=3)
/// >>> decode = EngineSpec("decode", model, tokens_per_block=24, layout="NHD", tp_size=2)
/// >>> route = Route(prefill, decode)
/// >>> route.readers(1)  # heads 2 and 3 are split between both targets
/// (0, 1)
/// >>> plan = route.plan(0, [[7, 8, 9]], [[0, 1]], tokens=(0, 48))
/// >>> plan.pairs, plan.num_bytes
/// (((0, 0), (1, 0)), 73728)
#[pyclass(frozen, module = "kvferry._core")]
pub struct Route {
    inner: Arc<route::Route>,
    source: Py<PyAny>,
    target: Py<PyAny>,
}

#[pymethods]
impl Route {
    #[new]
    #[pyo3(signature = (source, target, *, allow_missing_layers=false))]
    fn new(
        source: &Bound<'_, PyAny>,
        target: &Bound<'_, PyAny>,
        allow_missing_layers: bool,
    ) -> PyResult<Self> {
        let inner =
            route::Route::new(engine_of(source)?, engine_of(target)?, allow_missing_layers).or_raise()?;
        Ok(Self { inner: Arc::new(inner), source: source.clone().unbind(), target: target.clone().unbind() })
    }

    /// The engine that is read.
    #[getter]
    fn source(&self, py: Python<'_>) -> Py<PyAny> {
        self.source.clone_ref(py)
    }

    /// The engine that is written.
    #[getter]
    fn target(&self, py: Python<'_>) -> Py<PyAny> {
        self.target.clone_ref(py)
    }

    /// Target ranks that need anything that `source_rank` holds, whoever they read it from.
    ///
    /// A source frees a request once each of them has reported.
    fn readers<'py>(
        &self,
        py: Python<'py>,
        source_rank: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.inner.readers(index("source_rank", source_rank)?).or_raise()?)
    }

    /// Plan what `target_rank` needs of one request.
    ///
    /// Parameters
    /// ----------
    /// target_rank
    ///     Global rank of the target.
    /// source_blocks, target_blocks
    ///     One list or integer array of block ids for each group of that side's own model; element ``i``
    ///     covers the tokens from ``first_token + i * tokens_per_block``.
    /// tokens
    ///     ``(start, end)`` token positions of the request; both may lie inside a block.
    /// source_first_token, target_first_token
    ///     Token at which that side's lists begin: one number, or one a group.
    ///
    /// Returns
    /// -------
    /// Plan
    ///     Empty where nothing is due.
    ///
    /// Raises
    /// ------
    /// BlockRangeError
    ///     An id that cannot exist, too few ids, or a due token in a null block of the source.
    /// AlignmentError
    ///     A first token inside a block.
    /// OverlapError
    ///     One target block is named for two due positions.
    #[pyo3(signature = (target_rank, source_blocks, target_blocks, tokens, *, source_first_token=None, target_first_token=None))]
    #[expect(clippy::too_many_arguments, reason = "the public signature")]
    fn plan(
        &self,
        py: Python<'_>,
        target_rank: &Bound<'_, PyAny>,
        source_blocks: &Bound<'_, PyAny>,
        target_blocks: &Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
        source_first_token: Option<&Bound<'_, PyAny>>,
        target_first_token: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Plan> {
        let rank = (Side::Target, index("target_rank", target_rank)?);
        let source = self.request_blocks(py, Side::Source, source_blocks, source_first_token)?;
        let target = self.request_blocks(py, Side::Target, target_blocks, target_first_token)?;
        self.plan_for(py, rank, &source, &target, tokens)
    }

    /// Plan what `source_rank` must send of one request.
    ///
    /// Over all sources these plans move what `plan` moves over all targets.
    ///
    /// Parameters
    /// ----------
    /// source_rank
    ///     Global rank of the source.
    /// source_blocks, target_blocks, tokens, source_first_token, target_first_token
    ///     As for `plan`.
    ///
    /// Raises
    /// ------
    /// BlockRangeError, AlignmentError, OverlapError
    ///     As for `plan`.
    #[pyo3(signature = (source_rank, source_blocks, target_blocks, tokens, *, source_first_token=None, target_first_token=None))]
    #[expect(clippy::too_many_arguments, reason = "the public signature")]
    fn plan_push(
        &self,
        py: Python<'_>,
        source_rank: &Bound<'_, PyAny>,
        source_blocks: &Bound<'_, PyAny>,
        target_blocks: &Bound<'_, PyAny>,
        tokens: &Bound<'_, PyAny>,
        source_first_token: Option<&Bound<'_, PyAny>>,
        target_first_token: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Plan> {
        let rank = (Side::Source, index("source_rank", source_rank)?);
        let source = self.request_blocks(py, Side::Source, source_blocks, source_first_token)?;
        let target = self.request_blocks(py, Side::Target, target_blocks, target_first_token)?;
        self.plan_for(py, rank, &source, &target, tokens)
    }

    fn __repr__(&self) -> String {
        format!("Route(source='{}', target='{}')", self.inner.source().id, self.inner.target().id)
    }
}

impl Route {
    fn plan_for(
        &self,
        py: Python<'_>,
        rank: (Side, usize),
        source: &RequestBlocks,
        target: &RequestBlocks,
        tokens: &Bound<'_, PyAny>,
    ) -> PyResult<Plan> {
        let tokens = interval("tokens", tokens)?;
        let route = Arc::clone(&self.inner);
        let inner = py.detach(|| plan::Plan::new(route, rank, source, target, tokens)).or_raise()?;
        Ok(Plan::new(inner))
    }

    fn request_blocks(
        &self,
        py: Python<'_>,
        side: Side,
        blocks: &Bound<'_, PyAny>,
        first_token: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<RequestBlocks> {
        let groups = self.inner.engine(side).groups.len();
        let spec = match side {
            Side::Source => self.source.bind(py),
            Side::Target => self.target.bind(py),
        };
        let null_blocks = spec.getattr("null_block_id")?;
        let null_of = |group: usize| match null_blocks.cast::<PyTuple>() {
            Ok(each) => each.get_item(group),
            Err(_) => Ok(null_blocks.clone()),
        };
        let ids = block_lists(&format!("{side}_blocks"), blocks, groups, null_of)?;
        let first_tokens = match first_token {
            Some(first) => first_tokens(&format!("{side}_first_token"), first, groups)?,
            None => vec![0; groups],
        };
        Ok(RequestBlocks { ids, first_tokens })
    }
}
