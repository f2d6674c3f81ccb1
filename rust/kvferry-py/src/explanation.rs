//! `kvferry.plan.Explanation`: a plan's numbers as structs that print and travel.

use kvferry_core::moves::explain::{DEFAULT_MIN_MEAN_BYTES, Summary};
use kvferry_core::planning::blocks::Stretch;
use kvferry_core::planning::pairing::GroupPair;
use kvferry_core::planning::plan::Plan;
use kvferry_core::planning::route::Transfer;
use kvferry_core::side::Side;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

/// Stretches that a group shows: enough for a picture, few enough for a page.
const MAX_STRETCHES: usize = 48;

/// Makes the Python struct.
pub fn explanation<'py>(
    py: Python<'py>,
    plan: &Plan,
    summaries: &[((usize, usize), Summary)],
) -> PyResult<Bound<'py, PyAny>> {
    let module = py.import("kvferry.plan")?;
    let class = |name: &str| module.getattr(name);
    let pair_class = class("PairExplanation")?;
    let pairs = summaries.iter().map(|(ranks, summary)| pair(&pair_class, *ranks, summary));
    let pairs = PyTuple::new(py, pairs.collect::<PyResult<Vec<_>>>()?)?;
    let (group_class, stretch_class) = (class("GroupExplanation")?, class("StretchExplanation")?);
    let groups = plan.route().pairs().iter().enumerate();
    let groups =
        groups.map(|(index, pair)| group(&group_class, &stretch_class, plan, pair, plan.stretches(index)));
    let groups = PyTuple::new(py, groups.collect::<PyResult<Vec<_>>>()?)?;
    let transfer_class = class("TransferExplanation")?;
    let transfers = plan.transfers().iter().map(|one| transfer(&transfer_class, plan, one));
    let transfers = PyTuple::new(py, transfers.collect::<PyResult<Vec<_>>>()?)?;
    let (end, rank) = plan.made_for();
    class("Explanation")?.call1((
        &plan.route().engine(Side::Source).id,
        &plan.route().engine(Side::Target).id,
        end.to_string(),
        rank,
        groups,
        transfers,
        pairs,
        PyTuple::new(py, plan.notify_only())?,
    ))
}

fn pair<'py>(
    class: &Bound<'py, PyAny>,
    (source_rank, target_rank): (usize, usize),
    summary: &Summary,
) -> PyResult<Bound<'py, PyAny>> {
    let (min_bytes, max_bytes) = summary.fragment_bytes;
    class.call1((
        source_rank,
        target_rank,
        summary.num_bytes,
        summary.num_fragments,
        summary.num_loops,
        min_bytes,
        max_bytes,
        summary.staged_descriptors,
        summary.staged_bytes,
        summary.staging_pays(DEFAULT_MIN_MEAN_BYTES),
    ))
}

fn group<'py>(
    class: &Bound<'py, PyAny>,
    stretch_class: &Bound<'py, PyAny>,
    plan: &Plan,
    pair: &GroupPair,
    stretches: &[Stretch],
) -> PyResult<Bound<'py, PyAny>> {
    let sharded = &plan.route().engine(Side::Target).groups[pair.target_group];
    let per_slot = sharded.group.tokens_per_slot();
    let slots = stretches.iter().map(|stretch| stretch.slots).sum::<u64>();
    let shown = stretches.iter().take(MAX_STRETCHES).map(|stretch| {
        let begin = stretch.position * per_slot;
        let tokens = (begin, begin + stretch.slots * per_slot);
        let source = (stretch.source_block, stretch.source_offset * per_slot);
        let target = (stretch.target_block, stretch.target_offset * per_slot);
        stretch_class.call1((tokens, source.0, source.1, target.0, target.1))
    });
    let tokens_per_block = Side::BOTH.map(|side| {
        let sharded = &plan.route().engine(side).groups[pair.group(side)];
        sharded.slots_per_block() * per_slot
    });
    class.call1((
        pair.source_group,
        pair.target_group,
        sharded.group.kind.word(),
        pair.layers.len(),
        slots * per_slot,
        stretches.len(),
        tokens_per_block[0],
        tokens_per_block[1],
        PyTuple::new(class.py(), shown.collect::<PyResult<Vec<_>>>()?)?,
    ))
}

fn transfer<'py>(class: &Bound<'py, PyAny>, plan: &Plan, transfer: &Transfer) -> PyResult<Bound<'py, PyAny>> {
    let pair = &plan.route().pairs()[transfer.pair];
    let names = plan.route().target().groups[pair.target_group].group.plane_names();
    let planes = &names[pair.facets[transfer.facet].planes.clone()];
    class.call1((
        transfer.source_rank,
        transfer.target_rank,
        pair.source_group,
        pair.target_group,
        PyTuple::new(class.py(), planes)?,
        (transfer.units.begin, transfer.units.end),
        transfer.layers.len(),
    ))
}
