//! Memory with known bytes in it, and what is copied there.

use kvferry_core::copies::repair::{Fault, Repair};
use kvferry_core::copies::view::View;
use kvferry_core::memory::region::Region;
use kvferry_core::memory::tensor::{Device, RawTensor};
use kvferry_core::moves::overlap::BoundSchedule;
use kvferry_core::moves::schedule::{BlockTable, CopyLoop, Schedule};
use kvferry_core::moves::strided::{Dim, Strided};
use proptest::prelude::*;

/// Bytes before and after each tensor, which nothing may touch.
const GUARD_BYTES: u64 = 64;
/// The widest vector, to whose multiples memory is aligned.
const WORD_BYTES: u64 = 16;

/// Memory whose bytes all differ from their neighbours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Memory(Vec<u128>);

impl Memory {
    pub fn new(num_bytes: u64, seed: u64) -> Self {
        let mut state = seed | 1;
        let mut word = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            u128::from(state) << 64 | u128::from(state.rotate_left(29) ^ 0x5bd1_e995)
        };
        Self((0..num_bytes.div_ceil(WORD_BYTES)).map(|_| word()).collect())
    }

    pub fn address(&mut self) -> u64 {
        self.0.as_mut_ptr().expose_provenance() as u64
    }
}

/// Schedules of one rank pair, with tensors at offsets of two memories.
#[derive(Clone, Debug)]
pub struct Copies {
    schedules: Vec<Schedule>,
    source: Vec<Region>,
    target: Vec<Region>,
    pub source_bytes: u64,
    pub target_bytes: u64,
}

/// Source and target tensors' memory.
pub type Ends = (Vec<Region>, Vec<Region>);

impl Copies {
    pub fn bound<'a>(&'a self, (source, target): &'a Ends) -> Vec<BoundSchedule<'a>> {
        self.schedules.iter().map(|schedule| BoundSchedule { schedule, source, target }).collect()
    }

    pub fn regions(&self, source: u64, target: u64) -> Ends {
        let at = |regions: &[Region], address: u64| {
            let moved = |region: &Region| Region { address: region.address + address, ..region.clone() };
            regions.iter().map(moved).collect()
        };
        (at(&self.source, source), at(&self.target, target))
    }
}

fn region(address: u64, extent_bytes: u64) -> Region {
    let (name, device) = ("tensor".to_owned(), Device::CPU);
    Region { name, address, extent_bytes, block_stride: 1, device, writable: true }
}

/// A loop with the entries that it needs, and the bytes that it reaches on either side.
#[derive(Clone, Debug)]
struct Loop {
    strided: Strided,
    entries: Vec<(u64, u64)>,
    offsets: (u64, u64),
    shifts: (u64, u64),
}

/// Counts, and padding on either side, of dimensions from the innermost outwards; on the source's side they
/// are nested in the order of `keys`.
fn strided(run_bytes: u64, unit: u64, dims: &[(u64, u64, u64, u32)]) -> Strided {
    let mut order: Vec<usize> = (0..dims.len()).collect();
    order.sort_by_key(|index| dims[*index].3);
    let mut source_strides = vec![0; dims.len()];
    let mut source_span = run_bytes;
    for index in order {
        let (count, padding, ..) = dims[index];
        source_strides[index] = source_span + padding * unit;
        source_span += (count - 1) * source_strides[index];
    }
    let mut target_span = run_bytes;
    let dims = dims.iter().zip(source_strides).map(|(&(count, _, padding, _), source_stride)| {
        let target_stride = target_span + padding * unit;
        target_span += (count - 1) * target_stride;
        Dim { count, source_stride, target_stride }
    });
    Strided::new(run_bytes, dims.collect::<Vec<_>>()).unwrap()
}

fn one_loop() -> impl Strategy<Value = Loop> {
    let unit = prop::sample::select(vec![1_u64, 2, 4, 8, 16, 16]);
    let run_units = prop_oneof![1_u64..5, 1_u64..40, 100_u64..700];
    let dims = prop::collection::vec((1_u64..5, 0_u64..4, 0_u64..4, any::<u32>()), 0..=4);
    let entries = prop::collection::vec((0_u64..6, any::<u32>()), 0..12);
    let shift = || prop_oneof![3 => Just(0_u64), 1 => 0_u64..16];
    (unit, run_units, dims, entries, (shift(), shift())).prop_map(
        |(unit, run_units, dims, entries, shifts)| {
            let strided = strided(run_units * unit, unit, &dims);
            let (source_span, target_span) = strided.span_bytes();
            // Any block may be read, also twice; each is written once, in any order.
            let mut places: Vec<(u32, usize)> = entries.iter().map(|entry| entry.1).zip(0..).collect();
            places.sort_unstable();
            let pairs = entries.iter().zip(places);
            let entries = pairs
                .map(|((source, _), (_, target))| {
                    (
                        source * source_span.next_multiple_of(unit),
                        target as u64 * target_span.next_multiple_of(unit),
                    )
                })
                .collect();
            Loop { strided, entries, offsets: (unit, 2 * unit), shifts }
        },
    )
}

pub fn copies() -> impl Strategy<Value = Copies> {
    prop::collection::vec(prop::collection::vec(one_loop(), 0..4), 1..3).prop_map(|schedules| {
        let mut copies = Copies {
            schedules: Vec::new(),
            source: Vec::new(),
            target: Vec::new(),
            source_bytes: GUARD_BYTES,
            target_bytes: GUARD_BYTES,
        };
        for loops in schedules {
            let mut schedule = Schedule::default();
            for Loop { strided, entries, offsets, shifts } in loops {
                let furthest = |end: fn(&(u64, u64)) -> u64| entries.iter().map(end).max().unwrap_or(0);
                let (source_span, target_span) = strided.span_bytes();
                let extents = (
                    offsets.0 + furthest(|e| e.0) + source_span,
                    offsets.1 + furthest(|e| e.1) + target_span,
                );
                let begin = schedule.table.source.len();
                let BlockTable { source, target } = &mut schedule.table;
                source.extend(entries.iter().map(|entry| entry.0));
                target.extend(entries.iter().map(|entry| entry.1));
                schedule.loops.push(CopyLoop {
                    source_tensor: copies.source.len(),
                    target_tensor: copies.target.len(),
                    source_offset: offsets.0,
                    target_offset: offsets.1,
                    strided,
                    entries: begin..begin + entries.len(),
                });
                copies.source.push(region(copies.source_bytes + shifts.0, extents.0));
                copies.target.push(region(copies.target_bytes + shifts.1, extents.1));
                let room = |extent: u64| (16 + extent + GUARD_BYTES).next_multiple_of(WORD_BYTES);
                copies.source_bytes += room(extents.0);
                copies.target_bytes += room(extents.1);
            }
            copies.schedules.push(schedule);
        }
        copies
    })
}

/// A tensor of which some rows are repaired.
#[derive(Clone, Debug)]
pub struct Rows {
    raw: RawTensor,
    indices: Vec<i64>,
    fault: Fault,
    pub num_bytes: u64,
}

impl Rows {
    pub fn repair(&self, memory: u64) -> Repair {
        let raw = RawTensor { address: memory + self.raw.address, ..self.raw.clone() };
        Repair::new(&View::new("rows", &raw).unwrap(), &self.indices, self.fault).unwrap()
    }
}

/// Rows of any sizes and alignments, whose dimensions lie in any order.
pub fn rows() -> impl Strategy<Value = Rows> {
    let sizes = (1_i64..5, 1_i64..6, 1_i64..5, prop_oneof![1_i64..9, Just(64)], 1_i64..5);
    let kind = (0_u8..4, prop::sample::select(vec![1_u64, 2, 4]), 0_u64..4);
    let strides = prop::collection::vec((any::<u32>(), prop_oneof![4 => Just(0_i64), 1 => 1_i64..4]), 5);
    let picked = prop::collection::vec(any::<bool>(), 4);
    (sizes, kind, strides, picked).prop_map(|(sizes, (kind, item_bytes, shift), strides, picked)| {
        let (rows, part_tokens, heads, elements, parts) = sizes;
        let (fault, tokens) = match kind {
            0 => (Fault::BlockSize(parts.unsigned_abs()), part_tokens * parts),
            1 => (Fault::BlockSizeAndLayout(parts.unsigned_abs()), part_tokens * parts),
            _ => (Fault::Layout, part_tokens),
        };
        let planes: &[i64] = if kind == 3 { &[2] } else { &[] };
        let shape: Vec<i64> = [&[rows], planes, &[tokens, heads, elements]].concat();
        // Elements are innermost more often than not, as in every engine.
        let mut order: Vec<usize> = (0..shape.len()).collect();
        order.sort_by_key(|dim| {
            let is_element = *dim + 1 == shape.len();
            if is_element && strides[*dim].0 % 4 > 0 { 0 } else { strides[*dim].0.max(1) }
        });
        let item = i64::try_from(item_bytes).unwrap();
        let mut span = item;
        let mut steps = vec![item; shape.len()];
        for dim in order {
            steps[dim] = span + strides[dim].1 * item;
            span += (shape[dim] - 1) * steps[dim];
        }
        let address = GUARD_BYTES + shift * item_bytes;
        let device = Device::CPU;
        let raw = RawTensor { address, shape, strides: steps, item_bytes, device, writable: true };
        let indices = (0..rows).rev().filter(|row| picked[usize::try_from(*row).unwrap()]).collect();
        Rows { raw, indices, fault, num_bytes: address + span.unsigned_abs() + GUARD_BYTES }
    })
}
