//! `Plan`: what one rank moves for one request.

use std::sync::Arc;

use kvferry_core::memory::cache::RankCache;
use kvferry_core::moves::bind::{bind, bind_checked};
use kvferry_core::moves::explain::{explain, summarize};
use kvferry_core::moves::overlap::{self, BoundSchedule};
use kvferry_core::moves::schedule::Schedule;
use kvferry_core::moves::staging::stage;
use kvferry_core::planning::plan;
use kvferry_core::side::Side;
use kvferry_cuda::Memory;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PySequence, PyTuple};

use crate::cache::{End, KVCache};
use crate::descriptors::Descriptors;
use crate::errors::OrRaise;
use crate::execution::Execution;
use crate::explanation::explanation;
use crate::loops::Loops;
use crate::staged::Staged;

/// What one target rank reads (`Route.plan`), or one source rank sends (`Route.plan_push`), for one request.
///
/// Attributes
/// ----------
/// pairs
///     The (source rank, target rank) pairs that move bytes, ascending.
/// source_ranks, target_ranks
///     The sorted ends of these pairs.
/// notify_only
///     For a target rank, the source ranks that hold something it needs and are not read: they must
///     still hear that the request is done. Empty for a source rank.
/// num_bytes
///     Payload.
#[pyclass(frozen, module = "kvferry._core")]
pub struct Plan {
    inner: plan::Plan,
}

impl Plan {
    /// Wraps a plan of the core.
    pub fn new(inner: plan::Plan) -> Self {
        Self { inner }
    }

    fn ranks(&self, side: Side) -> Vec<usize> {
        let end = |(source, target): (usize, usize)| if side == Side::Source { source } else { target };
        let mut ranks: Vec<usize> = self.inner.rank_pairs().into_iter().map(end).collect();
        ranks.sort_unstable();
        ranks.dedup();
        ranks
    }

    fn engine(&self, side: Side) -> &Arc<kvferry_core::specs::engine::Engine> {
        self.inner.route().engine(side)
    }
}

#[pymethods]
impl Plan {
    #[getter]
    fn pairs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.inner.rank_pairs())
    }

    #[getter]
    fn source_ranks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.ranks(Side::Source))
    }

    #[getter]
    fn target_ranks<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.ranks(Side::Target))
    }

    #[getter]
    fn notify_only<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, self.inner.notify_only())
    }

    #[getter]
    fn num_bytes(&self) -> u64 {
        self.inner.num_bytes()
    }

    /// What `target` reads from `source`, as flat columns.
    ///
    /// Parameters
    /// ----------
    /// source, target
    ///     A `KVCache`, or the `RankDescription` that a peer sent, of either side. They know their ranks.
    ///
    /// Returns
    /// -------
    /// Descriptors
    ///     Empty where the two ranks are no pair of this plan.
    ///
    /// Raises
    /// ------
    /// BlockRangeError
    ///     A block id lies outside a tensor.
    /// OverlapError
    ///     Two tensors of the target share a byte that is written, or (two `KVCache` of this process)
    ///     a byte is both read and written.
    /// LayoutError
    ///     A target tensor is read-only, or a description contradicts the engine's layout.
    fn descriptors(
        &self,
        py: Python<'_>,
        source: &Bound<'_, PyAny>,
        target: &Bound<'_, PyAny>,
    ) -> PyResult<Descriptors> {
        let source = End::read(self.engine(Side::Source), source)?;
        let target = End::read(self.engine(Side::Target), target)?;
        let schedule = py.detach(|| schedule(&self.inner, &source, &target)).or_raise()?;
        Descriptors::new(py, &schedule)
    }

    /// What `target` reads from `source`, as compact loops: hundreds of rows where descriptors are
    /// millions.
    ///
    /// Parameters
    /// ----------
    /// source, target
    ///     As for `descriptors`.
    ///
    /// Returns
    /// -------
    /// Loops
    ///     Empty where the two ranks are no pair of this plan.
    ///
    /// Raises
    /// ------
    /// BlockRangeError, OverlapError, LayoutError
    ///     As for `descriptors`.
    fn loops(&self, py: Python<'_>, source: &Bound<'_, PyAny>, target: &Bound<'_, PyAny>) -> PyResult<Loops> {
        let source = End::read(self.engine(Side::Source), source)?;
        let target = End::read(self.engine(Side::Target), target)?;
        let schedule = py.detach(|| schedule(&self.inner, &source, &target));
        Loops::new(py, schedule.or_raise()?)
    }

    /// What `target` reads from `source`, in two steps through a scratch buffer on the target.
    ///
    /// Parameters
    /// ----------
    /// source, target
    ///     As for `descriptors`.
    ///
    /// Returns
    /// -------
    /// Staged
    ///     Few long moves into scratch, and a local copy that finishes.
    ///
    /// Raises
    /// ------
    /// BlockRangeError, OverlapError, LayoutError
    ///     As for `descriptors`.
    fn staged(
        &self,
        py: Python<'_>,
        source: &Bound<'_, PyAny>,
        target: &Bound<'_, PyAny>,
    ) -> PyResult<Staged> {
        let source = End::read(self.engine(Side::Source), source)?;
        let target = End::read(self.engine(Side::Target), target)?;
        let staged =
            py.detach(|| schedule(&self.inner, &source, &target).and_then(|schedule| stage(&schedule)));
        Staged::new(py, staged.or_raise()?, target.cache)
    }

    /// Whether the two steps of `staged` pay for this rank pair.
    ///
    /// Parameters
    /// ----------
    /// source, target
    ///     As for `descriptors`.
    /// min_mean_bytes
    ///     Descriptors of at least this average are taken as they are.
    ///
    /// Returns
    /// -------
    /// bool
    ///     Whether descriptors are smaller than that, and staging has at most half as many.
    #[pyo3(signature = (source, target, *, min_mean_bytes=4096))]
    fn recommend_staging(
        &self,
        py: Python<'_>,
        source: &Bound<'_, PyAny>,
        target: &Bound<'_, PyAny>,
        min_mean_bytes: u64,
    ) -> PyResult<bool> {
        let source = End::read(self.engine(Side::Source), source)?;
        let target = End::read(self.engine(Side::Target), target)?;
        let summary = py.detach(|| {
            let schedule = schedule(&self.inner, &source, &target)?;
            summarize(&schedule)
        });
        Ok(summary.or_raise()?.staging_pays(min_mean_bytes))
    }

    /// Run the plan in this process; on host memory, it has finished when this returns.
    ///
    /// Parameters
    /// ----------
    /// sources, targets
    ///     One `KVCache` or several. Caches of ranks that the plan does not use are ignored.
    /// stream
    ///     A CUDA stream as a number (torch: ``stream.cuda_stream``); ``None``, 0: the default stream. Copies
    ///     of device memory are enqueued there, not waited for: order other streams and keep tensors alive
    ///     until it has passed (`kvferry.cuda`). Copies of host memory alone have finished, whatever it is.
    /// threads
    ///     At most so many threads take part; ``None``: as many as the machine runs at once.
    ///
    /// Raises
    /// ------
    /// ValueError
    ///     A rank that the plan uses has no cache here.
    /// BlockRangeError, OverlapError, LayoutError
    ///     As for `descriptors`. Nothing has been written then.
    /// TransferError
    ///     The CUDA driver has failed: what was enqueued before may still run (`kvferry.cuda`).
    #[pyo3(signature = (sources, targets, *, stream=None, threads=None))]
    fn copy(
        &self,
        py: Python<'_>,
        sources: &Bound<'_, PyAny>,
        targets: &Bound<'_, PyAny>,
        stream: Option<&Bound<'_, PyAny>>,
        threads: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<()> {
        let execution = Execution::new(stream, threads)?;
        // These references keep the memory alive while other threads may change the caller's lists.
        let sources = self.caches(Side::Source, sources)?;
        let targets = self.caches(Side::Target, targets)?;
        let pairs = self.inner.rank_pairs();
        let ends = pairs.iter().map(|&(source, target)| {
            Ok((self.cache(Side::Source, &sources, source)?, self.cache(Side::Target, &targets, target)?))
        });
        let ends = ends.collect::<PyResult<Vec<(Registered, Registered)>>>()?;
        py.detach(|| run(&self.inner, &ends, execution)).or_raise()
    }

    /// The plan in numbers, over the given tensors or, where none are given, over dense ones.
    ///
    /// Parameters
    /// ----------
    /// sources, targets
    ///     One `KVCache` or `RankDescription`, or several, of either side.
    ///
    /// Returns
    /// -------
    /// Explanation
    ///     Prints well, and has ``num_bytes`` and ``num_fragments``.
    #[pyo3(signature = (sources=None, targets=None))]
    fn explain<'py>(
        &self,
        py: Python<'py>,
        sources: Option<&Bound<'py, PyAny>>,
        targets: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let sources = End::read_all(self.engine(Side::Source), sources)?;
        let targets = End::read_all(self.engine(Side::Target), targets)?;
        let caches = |ends: &[End]| ends.iter().map(|end| Arc::clone(&end.cache)).collect::<Vec<_>>();
        let (sources, targets) = (caches(&sources), caches(&targets));
        let summaries = py.detach(|| explain(&self.inner, &sources, &targets)).or_raise()?;
        explanation(py, &self.inner, &summaries)
    }

    /// The plan as a picture: who reads which heads from whom, and how blocks meet.
    ///
    /// Returns
    /// -------
    /// str
    ///     A standalone SVG document.
    fn to_svg<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import("kvferry.picture")?.getattr("to_svg")?.call1((self.explain(py, None, None)?,))
    }

    fn __repr__(&self) -> String {
        let (end, rank) = self.inner.made_for();
        let (pairs, num_bytes) = (self.inner.rank_pairs(), self.inner.num_bytes());
        format!("Plan({end}_rank={rank}, pairs={pairs:?}, num_bytes={num_bytes})")
    }
}

impl Plan {
    /// One `KVCache` or several, each rank once.
    fn caches<'py>(&self, side: Side, given: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, KVCache>>> {
        let cache = |cache: Bound<'py, PyAny>| match cache.cast_into::<KVCache>() {
            Ok(cache) => Ok(cache),
            Err(error) => {
                let class = error.into_inner().get_type();
                Err(PyTypeError::new_err(format!("{side}s must be KVCaches, got {class}")))
            }
        };
        // Asking whether something is a sequence takes Python longer than anything else here.
        let caches = match given.cast::<KVCache>() {
            Ok(one) => vec![one.clone()],
            Err(_) => match given.cast::<PySequence>() {
                Ok(several) => several.try_iter()?.map(|one| cache(one?)).collect::<PyResult<Vec<_>>>()?,
                Err(_) => vec![cache(given.clone())?],
            },
        };
        let mut ranks = self.ranks(side);
        ranks.retain(|rank| caches.iter().filter(|cache| cache.get().inner.rank == *rank).count() > 1);
        match ranks.first() {
            Some(rank) => Err(PyValueError::new_err(format!("{side}s has rank {rank} twice"))),
            None => Ok(caches),
        }
    }

    fn cache(&self, side: Side, caches: &[Bound<'_, KVCache>], rank: usize) -> PyResult<Registered> {
        match caches.iter().map(Bound::get).find(|cache| cache.inner.rank == rank) {
            Some(cache) => {
                Ok(Registered { cache: Arc::clone(&cache.inner), memory: Arc::clone(&cache.memory) })
            }
            None => Err(PyValueError::new_err(format!(
                "{side}s has no KVCache of rank {rank} of engine {:?}, which the plan uses",
                self.engine(side).id
            ))),
        }
    }
}

/// The checked schedule of one pair.
fn schedule(plan: &plan::Plan, source: &End, target: &End) -> kvferry_core::Result<Schedule> {
    bind_checked(plan, &source.cache, &target.cache, source.is_local && target.is_local)
}

/// One end of a pair, without Python's object.
struct Registered {
    cache: Arc<RankCache>,
    memory: Arc<Memory>,
}

/// Binds and checks every pair, then copies.
fn run(
    plan: &plan::Plan,
    ends: &[(Registered, Registered)],
    execution: Execution,
) -> kvferry_core::Result<()> {
    let schedules: Vec<Schedule> = ends
        .iter()
        .map(|(source, target)| bind(plan, &source.cache, &target.cache))
        .collect::<kvferry_core::Result<_>>()?;
    let bound: Vec<BoundSchedule<'_>> = schedules
        .iter()
        .zip(ends)
        .map(|(schedule, (source, target))| BoundSchedule::new(schedule, &source.cache, &target.cache))
        .collect();
    let memory: Vec<[&Memory; 2]> =
        ends.iter().map(|(source, target)| [&*source.memory, &*target.memory]).collect();
    overlap::check(&bound, true)?;
    // SAFETY: targets are writable (`bind`), and no byte of one is written twice or read (`check`). Each cache
    // came from a `KVCache`, which our caller holds until this returns; that it outlives what is enqueued on
    // a stream, and that the stream exists, is said to be the part of Python's caller.
    unsafe { execution.copy(&bound, &memory) }
}
