//! Copies over real memory: 512 MiB on either side, far more than any cache holds.

use std::sync::Arc;

use kvferry_benches::touched_memory;
use kvferry_core::memory::cache::RankCache;
use kvferry_core::moves::bind::bind;
use kvferry_core::moves::overlap::{self, BoundSchedule};
use kvferry_core::moves::schedule::Schedule;
use kvferry_core::planning::plan::Plan;
use kvferry_core::side::Side;

use crate::request::{Request, Shape};

/// Bytes of each side.
pub const TOTAL_BYTES: usize = 512 << 20;
/// Bytes of whole blocks that are copied.
const BLOCK_BYTES: [u64; 5] = [256, 1 << 10, 4 << 10, 16 << 10, 64 << 10];
/// Bytes of one head's elements of one token.
const HEAD_BYTES: u64 = 128 * 2;
/// Pairs of a layout and tokens a block: a change of layout, of block size, and of both, in runs of one
/// head's 256 bytes.
const RELAYOUTS: [[(&str, u64); 2]; 6] = [
    [("NHD", 16), ("HND", 16)],
    [("HND", 16), ("NHD", 16)],
    [("NHD", 64), ("HND", 64)],
    [("HND", 64), ("NHD", 64)],
    [("HND", 16), ("NHD", 64)],
    [("NHD", 64), ("HND", 16)],
];

/// One request over two tensors.
pub struct Case {
    /// What is moved, for people.
    pub name: String,
    schedule: Schedule,
    source: RankCache,
    target: RankCache,
}

/// Both sides' memory, which the cases share.
pub fn memory() -> [*mut u8; 2] {
    [touched_memory(TOTAL_BYTES), touched_memory(TOTAL_BYTES)]
}

/// The cases: whole blocks by size, and re-layouts, all in random order.
pub fn cases([source, target]: [*mut u8; 2]) -> impl Iterator<Item = Case> {
    let whole = BLOCK_BYTES.into_iter().map(|block_bytes| {
        // One of eight ranks, with one head, whose planes are apart.
        let tokens_per_block = block_bytes / HEAD_BYTES;
        let shape = Shape { layers: 1, tp_size: 8, tokens_per_block, layout: "KBNHD" };
        (format!("blocks of {block_bytes} bytes"), [shape, shape])
    });
    let relayouts = RELAYOUTS.into_iter().map(|pair| {
        let [from, to] = pair;
        let shape = |(layout, tokens_per_block)| Shape { layers: 1, tp_size: 1, tokens_per_block, layout };
        (format!("{} {} to {} {}", from.0, from.1, to.0, to.1), pair.map(shape))
    });
    whole.chain(relayouts).map(move |(name, [from, to])| Case::new(name, from, to, source, target))
}

impl Case {
    fn new(name: String, from: Shape, to: Shape, source: *mut u8, target: *mut u8) -> Self {
        let plan = Request::new(from, to, TOTAL_BYTES as u64 / token_bytes(from)).plan();
        let source = backed(&plan, Side::Source, from, source);
        let target = backed(&plan, Side::Target, to, target);
        let schedule = bind(&plan, &source, &target).expect("blocks inside the tensors");
        let case = Self { name, schedule, source, target };
        overlap::check(&[case.bound()], true).expect("two tensors that share no memory");
        case
    }

    fn bound(&self) -> BoundSchedule<'_> {
        BoundSchedule::new(&self.schedule, &self.source, &self.target)
    }

    /// Moves everything once.
    pub fn copy(&self, threads: usize) {
        // SAFETY: both tensors are host memory that is never freed, `new` has checked the schedule, and
        // nothing else runs until this returns.
        unsafe { kvferry_copy::copy(&[self.bound()], Some(threads)) };
    }
}

/// What a rank holds of one token, key and value, in one layer.
fn token_bytes(shape: Shape) -> u64 {
    2 * (8 / shape.tp_size as u64) * HEAD_BYTES
}

/// The one tensor of a side, over `memory` that it fills.
fn backed(plan: &Plan, side: Side, shape: Shape, memory: *mut u8) -> RankCache {
    let engine = Arc::clone(plan.route().engine(side));
    let blocks = TOTAL_BYTES as u64 / (token_bytes(shape) * shape.tokens_per_block);
    let cache = RankCache::dense(engine, 0, |_| blocks).expect("tensors that fit");
    assert_eq!(cache.regions[0].extent_bytes, TOTAL_BYTES as u64, "the tensor fills the memory");
    cache.map(|tensor| tensor.address = memory.expose_provenance() as u64)
}
