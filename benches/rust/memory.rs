//! Copies over real memory: 512 MiB on either side, far more than any cache holds, moved by kvferry or
//! by `memcpy` from one contiguous piece to the next.

use std::sync::Arc;
use std::{ptr, thread};

use kvferry_core::memory::cache::RankCache;
use kvferry_core::moves::bind::bind;
use kvferry_core::moves::expand::fragments;
use kvferry_core::moves::overlap::{self, BoundSchedule};
use kvferry_core::moves::schedule::Schedule;
use kvferry_core::planning::plan::Plan;
use kvferry_core::side::Side;

use crate::request::{Request, Shape};

/// Bytes of each side.
pub const TOTAL_BYTES: u64 = 512 << 20;
/// Tensors of the engines' allocators begin at a page; what `Vec` gets need not.
const PAGE_BYTES: usize = 4096;
const TOKEN_BYTES: u64 = 2 * 8 * 128 * 2; // planes, heads, elements of a head, bytes of an element

/// One request over two tensors.
pub struct Case {
    /// What is moved, for people.
    pub name: &'static str,
    schedule: Schedule,
    source: RankCache,
    target: RankCache,
    /// The moves in the order of the request's tokens; empty where a block is not one move.
    by_token: Vec<Move>,
    /// The moves in the order of target addresses, as few as can be.
    by_target: Vec<Move>,
}

/// A way to move everything that a case moves.
pub struct Contestant<'a> {
    /// Its name, for people.
    pub name: &'static str,
    /// Moves everything once.
    pub run: Box<dyn Fn() + 'a>,
}

/// One call of `memcpy`.
#[derive(Clone, Copy)]
struct Move {
    source: *const u8,
    target: *mut u8,
    num_bytes: usize,
}

// SAFETY: `Case` leaks what both pointers lead to, and no two moves of a case have a target in common.
unsafe impl Sync for Move {}

/// The cases, over the same memory: whole blocks of 64 KiB, and 16 head-major tokens a block to 64
/// token-major ones in runs of 256 bytes.
pub fn cases() -> [Case; 2] {
    let (source, target) = (touched_memory(), touched_memory());
    let shape = |tokens_per_block, layout| Shape { layers: 1, tp_size: 1, tokens_per_block, layout };
    let whole = shape(16, "BKNHD");
    [
        Case::new("64 KiB blocks", whole, whole, source, target),
        Case::new("HND 16 to NHD 64", shape(16, "HND"), shape(64, "NHD"), source, target),
    ]
}

/// Pages that exist, so that no copy pays for their first touch, and that are never given back.
fn touched_memory() -> *mut u8 {
    let bytes = usize::try_from(TOTAL_BYTES).expect("64 bits");
    let memory = vec![1_u8; bytes + PAGE_BYTES].leak();
    let skipped = memory.as_ptr().align_offset(PAGE_BYTES);
    memory[skipped..].as_mut_ptr()
}

impl Case {
    fn new(name: &'static str, from: Shape, to: Shape, source: *mut u8, target: *mut u8) -> Self {
        let plan = Request::new(from, to, TOTAL_BYTES / TOKEN_BYTES).plan();
        let source_cache = backed(&plan, Side::Source, source);
        let target_cache = backed(&plan, Side::Target, target);
        let schedule = bind(&plan, &source_cache, &target_cache).expect("blocks inside the tensors");
        let step = |source_offset: u64, target_offset: u64, length: u64| Move {
            source: at(source, source_offset),
            target: at(target, target_offset),
            num_bytes: usize::try_from(length).expect("64 bits"),
        };
        let by_target: Vec<Move> = fragments(&schedule)
            .expect("few enough runs")
            .iter()
            .map(|fragment| step(fragment.source_offset, fragment.target_offset, fragment.length))
            .collect();
        let stretches = plan.stretches(0);
        let block_bytes = TOTAL_BYTES / stretches.len() as u64;
        let is_whole = schedule.loops[0].strided.run_bytes == block_bytes;
        let by_token = stretches
            .iter()
            .filter(|_| is_whole)
            .map(|stretch| {
                step(stretch.source_block * block_bytes, stretch.target_block * block_bytes, block_bytes)
            })
            .collect();
        let case = Self { name, schedule, source: source_cache, target: target_cache, by_token, by_target };
        overlap::check(&[case.bound()], true).expect("two tensors that share no memory");
        case
    }

    fn bound(&self) -> BoundSchedule<'_> {
        BoundSchedule::new(&self.schedule, &self.source, &self.target)
    }

    /// kvferry first, then what it is compared with.
    pub fn contestants(&self, threads: usize) -> Vec<Contestant<'_>> {
        let mut contestants = vec![
            Contestant { name: "kvferry", run: Box::new(move || self.ferry(threads)) },
            Contestant {
                name: "memcpy in target order",
                run: Box::new(move || memcpy(&self.by_target, threads)),
            },
        ];
        if !self.by_token.is_empty() {
            let run = Box::new(move || memcpy(&self.by_token, threads));
            contestants.push(Contestant { name: "memcpy in token order", run });
        }
        contestants
    }

    fn ferry(&self, threads: usize) {
        // SAFETY: both tensors are host memory that is never freed, `new` has checked the schedule, and
        // nothing else runs until this returns.
        unsafe { kvferry_copy::copy(&[self.bound()], Some(threads)) };
    }
}

/// Moves each piece by `memcpy`, every thread a stretch of them.
fn memcpy(moves: &[Move], threads: usize) {
    let copy = |moves: &[Move]| {
        for step in moves {
            // SAFETY: both ends are leaked memory that nothing else touches until `memcpy` returns, and
            // source and target are two allocations.
            unsafe { ptr::copy_nonoverlapping(step.source, step.target, step.num_bytes) };
        }
    };
    if threads == 1 {
        return copy(moves);
    }
    thread::scope(|scope| {
        for stretch in moves.chunks(moves.len().div_ceil(threads)) {
            scope.spawn(move || copy(stretch));
        }
    });
}

/// The one tensor of a side, over `memory` that it fills.
fn backed(plan: &Plan, side: Side, memory: *mut u8) -> RankCache {
    let engine = Arc::clone(plan.route().engine(side));
    let tokens_per_block = engine.groups[0].tokens_per_block;
    let blocks = TOTAL_BYTES / (TOKEN_BYTES * tokens_per_block);
    let cache = RankCache::dense(engine, 0, |_| blocks).expect("tensors that fit");
    assert_eq!(cache.regions[0].extent_bytes, TOTAL_BYTES, "the tensor fills the memory");
    cache.map(|tensor| tensor.address = memory.expose_provenance() as u64)
}

fn at(memory: *mut u8, offset: u64) -> *mut u8 {
    assert!(offset < TOTAL_BYTES, "offset {offset} is outside [0, {TOTAL_BYTES})");
    memory.wrapping_add(usize::try_from(offset).expect("64 bits"))
}
