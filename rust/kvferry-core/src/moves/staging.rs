//! Staging: few long runs of the source into a scratch buffer, then one local copy to their places.
//!
//! A transport pays for each descriptor about what it pays for tens of kilobytes. Where fragments are
//! small, it is cheaper to move what lies between them as well, and to sort it out on the target.

use crate::error::{Result, fail};
use crate::moves::expand::{MAX_RUNS, try_push};
use crate::moves::schedule::{BlockTable, CopyLoop, Schedule};
use crate::moves::strided::{Dim, Strided, each_step};

/// Bytes between two pieces of the source up to which both are moved as one run. A descriptor takes
/// some 5 µs on a wire that moves 10 GB/s, as much as 50 KB; a page is an order of magnitude cheaper
/// than that, and keeps scratch buffers within sight of the payload.
pub const MAX_GAP_BYTES: u64 = 4096;

/// A contiguous stretch of a source tensor, and its place in the scratch buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct StagedRun {
    /// Index of the source rank's tensor.
    pub source_tensor: usize,
    /// Bytes from its first.
    pub source_offset: u64,
    /// Bytes from the scratch buffer's first.
    pub scratch_offset: u64,
    /// Bytes.
    pub length: u64,
}

/// The two steps of a staged transfer.
#[derive(Clone, Debug, Default)]
pub struct Staged {
    /// First step: what moves into scratch, by source.
    pub runs: Vec<StagedRun>,
    /// Bytes that the scratch buffer must have.
    pub scratch_bytes: u64,
    /// Second step, whose only source tensor is the scratch buffer.
    pub finish: Schedule,
}

/// Splits what one rank pair moves into two steps.
pub fn stage(schedule: &Schedule) -> Result<Staged> {
    let hulls: Vec<Hull> = schedule.loops.iter().map(|copy| Hull::of(&copy.strided)).collect();
    let steps = |(copy, hull): (&CopyLoop, &Hull)| hull.steps() * copy.entries.len() as u128;
    let total: u128 = schedule.loops.iter().zip(&hulls).map(steps).sum();
    if total > u128::from(MAX_RUNS) {
        fail!(Value, "staging the plan takes {total} runs, more than {MAX_RUNS}");
    }
    let runs = runs(schedule, &hulls)?;
    let scratch_bytes = runs.last().map_or(0, |run| run.scratch_offset + run.length);
    let finish = finish(schedule, &hulls, &runs)?;
    Ok(Staged { runs, scratch_bytes, finish })
}

/// A loop seen from the source: the dimensions that are not worth cutting along, and the rest.
struct Hull {
    /// Dimensions along which pieces lie further apart than [`MAX_GAP_BYTES`].
    outer: Vec<Dim>,
    /// The others, around the contiguous run.
    inner: Vec<Dim>,
    /// Bytes from the first to one past the last of the inner dimensions.
    span_bytes: u64,
}

impl Hull {
    fn of(strided: &Strided) -> Self {
        let mut dims = strided.looping().to_vec();
        dims.sort_by_key(|dim| dim.source_stride);
        let mut span_bytes = strided.run_bytes;
        let is_near = |dim: &&Dim| {
            let near = dim.source_stride <= span_bytes.saturating_add(MAX_GAP_BYTES);
            if near {
                span_bytes += (dim.count - 1) * dim.source_stride;
            }
            near
        };
        let inner: Vec<Dim> = dims.iter().take_while(is_near).copied().collect();
        let outer = dims.split_off(inner.len());
        Self { outer, inner, span_bytes }
    }

    fn steps(&self) -> u128 {
        self.outer.iter().map(|dim| u128::from(dim.count)).product()
    }
}

/// The runs that cover every hull, merged where they are near each other.
fn runs(schedule: &Schedule, hulls: &[Hull]) -> Result<Vec<StagedRun>> {
    let mut spans = Vec::new();
    for (copy, hull) in schedule.loops.iter().zip(hulls) {
        for entry in &schedule.table.source[copy.entries.clone()] {
            let mut pushed = Ok(());
            each_step(&hull.outer, copy.source_offset + entry, 0, &mut |source, _| {
                if pushed.is_ok() {
                    pushed = try_push(&mut spans, (copy.source_tensor, source, source + hull.span_bytes));
                }
            });
            pushed?;
        }
    }
    spans.sort_unstable();
    spans.dedup_by(|next, last| {
        let joins = next.0 == last.0 && next.1 <= last.2.saturating_add(MAX_GAP_BYTES);
        if joins {
            last.2 = last.2.max(next.2);
        }
        joins
    });
    let mut scratch_offset = 0;
    let place = |(source_tensor, begin, end): (usize, u64, u64)| {
        let run = StagedRun { source_tensor, source_offset: begin, scratch_offset, length: end - begin };
        scratch_offset += run.length;
        run
    };
    Ok(spans.into_iter().map(place).collect())
}

/// The schedule's loops with scratch as their source: one for every step of the outer dimensions.
fn finish(schedule: &Schedule, hulls: &[Hull], runs: &[StagedRun]) -> Result<Schedule> {
    let in_scratch = |tensor: usize, offset: u64| {
        let after = runs.partition_point(|run| (run.source_tensor, run.source_offset) <= (tensor, offset));
        let run = &runs[after - 1]; // every hull lies in a run
        run.scratch_offset + (offset - run.source_offset)
    };
    let mut finish = Schedule::default();
    for (copy, hull) in schedule.loops.iter().zip(hulls) {
        let strided = Strided::new(copy.strided.run_bytes, hull.inner.iter().copied())
            .expect("no more dimensions than the loop has");
        let BlockTable { source, target } = &schedule.table;
        let mut pushed = Ok(());
        each_step(&hull.outer, copy.source_offset, copy.target_offset, &mut |source_at, target_at| {
            let begin = finish.table.target.len();
            for entry in copy.entries.clone() {
                let scratch = in_scratch(copy.source_tensor, source_at + source[entry]);
                if pushed.is_ok() {
                    pushed = try_push(&mut finish.table.source, scratch)
                        .and_then(|()| try_push(&mut finish.table.target, target[entry]));
                }
            }
            finish.loops.push(CopyLoop {
                source_tensor: 0,
                target_tensor: copy.target_tensor,
                source_offset: 0,
                target_offset: target_at,
                strided,
                entries: begin..finish.table.target.len(),
            });
        });
        pushed?;
    }
    Ok(finish)
}
