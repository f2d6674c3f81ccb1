//! Every kernel of this machine against a loop over bytes.

use proptest::prelude::*;
use proptest::sample::Index;

use kvferry_core::moves::strided::{Dim, MAX_DIMS, Strided};

use super::supported;
use crate::work::{Work, cut};

/// Bytes that a case moves at most: tests are not optimised.
const MAX_BYTES: u64 = 100_000;
/// What bytes of a target hold that nobody has written.
const UNTOUCHED: u8 = 0xEE;
/// Bytes on either side of a target that stay as they are; whole lines.
const GUARD_BYTES: u64 = 128;

/// One end of a case.
#[derive(Clone, Debug)]
struct End {
    /// Bytes by which the memory misses the alignment of a line.
    shift: u64,
    /// Bytes from one step to the next, for each dimension.
    strides: Vec<u64>,
    /// In the order of the table.
    entries: Vec<u64>,
    /// Bytes up to the end of what a table of any entries reaches.
    extent_bytes: u64,
}

#[derive(Clone, Debug)]
struct Case {
    run_bytes: u64,
    counts: Vec<u64>,
    source: End,
    target: End,
}

/// What an end is made from: the order in which dimensions nest (the last one is the table), the bytes
/// between their steps, and which slots the table names.
#[derive(Clone, Debug)]
struct Draft {
    shift: u64,
    order: Vec<usize>,
    gaps: Vec<u64>,
    slots: Vec<u64>,
    picks: Vec<Index>,
}

/// Lengths on both sides of every one at which a kernel changes its way, and any other.
fn run_bytes() -> impl Strategy<Value = u64> {
    let edges = [32_u64, 64, 96, 128, 256, 512, 4096, 8192];
    let near = (prop::sample::select(edges.to_vec()), 0_u64..3).prop_map(|(edge, by)| edge + by - 1);
    prop_oneof![2 => near, 1 => 1_u64..=300, 1 => 1_u64..=10_000]
}

fn draft(dims: usize, slots: u64) -> impl Strategy<Value = Draft> {
    (
        0_u64..64,
        Just((0..=dims).collect::<Vec<usize>>()).prop_shuffle(),
        prop::collection::vec(prop_oneof![Just(0_u64), 0_u64..100], dims + 1),
        Just((0..slots).collect::<Vec<u64>>()).prop_shuffle(),
        prop::collection::vec(any::<Index>(), 8),
    )
        .prop_map(|(shift, order, gaps, slots, picks)| Draft { shift, order, gaps, slots, picks })
}

/// Lays an end's dimensions out one around the other. `unit` divides every address. Targets name a slot
/// at most once, sources (`repeats`) as it comes.
fn end(draft: &Draft, run_bytes: u64, counts: &[u64], entries: usize, unit: u64, repeats: bool) -> End {
    let slots = draft.slots.len() as u64;
    let mut strides = vec![0; counts.len() + 1];
    let mut extent_bytes = run_bytes;
    for (&dim, gap) in draft.order.iter().zip(&draft.gaps) {
        strides[dim] = (extent_bytes + gap).next_multiple_of(unit);
        extent_bytes += strides[dim] * (counts.get(dim).copied().unwrap_or(slots) - 1);
    }
    let table_stride = strides.pop().unwrap();
    let slot =
        |(index, pick): (usize, &Index)| if repeats { *pick.get(&draft.slots) } else { draft.slots[index] };
    let entries =
        draft.picks.iter().enumerate().take(entries).map(|pick| slot(pick) * table_stride).collect();
    End { shift: draft.shift.next_multiple_of(unit), strides, entries, extent_bytes }
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = (run_bytes(), prop::collection::vec(2_u64..6, 0..=MAX_DIMS), 1_u64..9, 0_usize..9);
    let drafts = sizes.prop_flat_map(|(run_bytes, counts, slots, entries)| {
        let ends = (draft(counts.len(), slots), draft(counts.len(), slots));
        (Just((run_bytes, counts, entries)), ends, any::<bool>())
    });
    drafts.prop_filter_map("a case of too many bytes", |((run, counts, entries), ends, in_lines)| {
        let (source, target) = ends;
        // Kernels stream short runs where all that is written are whole lines.
        let (run_bytes, unit) = if in_lines { (run.next_multiple_of(64), 64) } else { (run, 1) };
        let entries = entries.min(target.slots.len());
        let runs = counts.iter().product::<u64>() * target.slots.len() as u64;
        (runs * run_bytes <= MAX_BYTES).then(|| Case {
            run_bytes,
            source: end(&source, run_bytes, &counts, entries, 1, true),
            target: end(&target, run_bytes, &counts, entries, unit, false),
            counts,
        })
    })
}

impl Case {
    fn strided(&self) -> Strided {
        let dims =
            self.counts.iter().zip(&self.source.strides).zip(&self.target.strides).map(
                |((&count, &source_stride), &target_stride)| Dim { count, source_stride, target_stride },
            );
        Strided::new(self.run_bytes, dims).unwrap()
    }

    /// Copies byte by byte between slices that begin where the entries count from.
    fn by_hand(&self, source: &[u8], target: &mut [u8]) {
        for (&from, &to) in self.source.entries.iter().zip(&self.target.entries) {
            self.step(0, (source, from), (target, to));
        }
    }

    fn step(&self, dim: usize, (source, from): (&[u8], u64), (target, to): (&mut [u8], u64)) {
        let Some(&count) = self.counts.get(dim) else {
            for byte in 0..self.run_bytes {
                target[index(to + byte)] = source[index(from + byte)];
            }
            return;
        };
        for at in 0..count {
            let from = from + at * self.source.strides[dim];
            self.step(dim + 1, (source, from), (target, to + at * self.target.strides[dim]));
        }
    }
}

fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn every_kernel_writes_what_a_loop_over_bytes_writes(
        case in cases(),
        parts in 1_usize..4,
        seed in any::<u8>(),
    ) {
        // The source ends with its allocation, so that tools which watch those see a read that goes on.
        let source_begin = case.source.shift;
        let random = |at: u64| at.wrapping_mul(0x9E37_79B9_7F4A_7C15).to_be_bytes()[0] ^ seed;
        let source: Vec<u8> = (0..source_begin + case.source.extent_bytes).map(random).collect();
        let mut target = vec![UNTOUCHED; index(case.target.extent_bytes + 3 * GUARD_BYTES)];
        let target_begin = GUARD_BYTES + target.as_ptr().align_offset(64) as u64 + case.target.shift;
        let mut expected = target.clone();
        case.by_hand(&source[index(source_begin)..], &mut expected[index(target_begin)..]);

        let strided = case.strided();
        for (name, kernel) in supported() {
            target.fill(UNTOUCHED);
            let from = source.as_ptr().expose_provenance() as u64 + source_begin;
            let to = target.as_mut_ptr().expose_provenance() as u64 + target_begin;
            let ends = ((from, case.source.entries.as_slice()), (to, case.target.entries.as_slice()));
            let work = Work::new(&strided, ends.0, ends.1, kernel.piece_bytes());
            for work in cut(vec![work], parts).iter().flatten() {
                // SAFETY: both vectors live on, each end lies inside its own, and no slot of the target is
                // named twice; the kernel is one of this machine.
                unsafe { kernel.run(work) };
            }
            prop_assert!(target == expected, "{name} differs at {:?}", first_difference(&target, &expected));
        }
    }
}

fn first_difference(one: &[u8], other: &[u8]) -> Option<usize> {
    one.iter().zip(other).position(|(one, other)| one != other)
}
