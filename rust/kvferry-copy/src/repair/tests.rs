//! Repairs against a model that moves elements one by one.

use kvferry_core::copies::repair::Fault;
use kvferry_core::copies::view::View;
use kvferry_core::memory::tensor::{Device, RawTensor};
use proptest::prelude::*;

use super::*;

/// Bytes on either side of a tensor that stay as they are.
const GUARD_BYTES: usize = 100;

/// A tensor `[rows, tokens, heads, elements]`, or with planes `[rows, 2, tokens, heads, elements]`, and
/// which rows of it are repaired.
#[derive(Clone, Debug)]
struct Case {
    sizes: Vec<usize>,
    strides: Vec<usize>,
    item_bytes: usize,
    extent_bytes: usize,
    rows: Vec<usize>,
    fault: Fault,
}

impl Case {
    /// Dimensions nest in that order, the last one innermost, with so many items between their steps.
    fn new(
        sizes: &[usize],
        item_bytes: usize,
        order: &[usize],
        gaps: &[usize],
        rows: &[usize],
        fault: Fault,
    ) -> Self {
        let (mut strides, mut extent_bytes) = (vec![0; sizes.len()], item_bytes);
        for (&dimension, gap) in order.iter().zip(gaps).rev() {
            strides[dimension] = extent_bytes + gap * item_bytes;
            extent_bytes += strides[dimension] * sizes[dimension].saturating_sub(1);
        }
        Self { sizes: sizes.to_vec(), strides, item_bytes, extent_bytes, rows: rows.to_vec(), fault }
    }

    fn memory(&self) -> Vec<u8> {
        let random = |at: usize| (at as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15).to_be_bytes()[0];
        (0..self.extent_bytes + 2 * GUARD_BYTES).map(random).collect()
    }

    /// The repair of the tensor in that memory.
    fn bind(&self, memory: &mut [u8]) -> Repair {
        let signed = |numbers: &[usize]| -> Vec<i64> {
            numbers.iter().map(|number| i64::try_from(*number).unwrap()).collect()
        };
        let raw = RawTensor {
            address: (memory.as_mut_ptr().expose_provenance() + GUARD_BYTES) as u64,
            shape: signed(&self.sizes),
            strides: signed(&self.strides),
            item_bytes: self.item_bytes as u64,
            device: Device::CPU,
            writable: true,
        };
        Repair::new(&View::new("cache", &raw).unwrap(), &signed(&self.rows), self.fault).unwrap()
    }

    /// What the memory holds afterwards.
    fn by_hand(&self, before: &[u8]) -> Vec<u8> {
        let mut after = before.to_vec();
        for row in &self.rows {
            let row = GUARD_BYTES + row * self.strides[0];
            let planes = if self.sizes.len() == 5 { 0..self.sizes[1] } else { 0..1 };
            for plane in planes {
                self.repair_plane(row + plane * self.strides[1], before, &mut after);
            }
        }
        after
    }

    fn repair_plane(&self, begin: usize, before: &[u8], after: &mut [u8]) {
        let [tokens, heads, elements] = *self.sizes.last_chunk().unwrap();
        let strides: [usize; 3] = *self.strides.last_chunk().unwrap();
        let part_tokens = match self.fault {
            Fault::Layout => tokens,
            Fault::BlockSize(ratio) | Fault::BlockSizeAndLayout(ratio) => tokens / as_size(ratio),
        };
        for token in 0..tokens {
            for head in 0..heads {
                // So many come before it in `[parts][heads][part_tokens]`, which is what was sent.
                let place = (token / part_tokens * heads + head) * part_tokens + token % part_tokens;
                let from = match self.fault {
                    Fault::BlockSize(_) => [place % tokens, place / tokens],
                    _ => [place / heads, place % heads],
                };
                for element in 0..elements {
                    let at = |[token, head]: [usize; 2]| {
                        let at = begin + token * strides[0] + head * strides[1] + element * strides[2];
                        at..at + self.item_bytes
                    };
                    after[at([token, head])].copy_from_slice(&before[at(from)]);
                }
            }
        }
    }
}

fn fault(name: usize, ratio: usize) -> Fault {
    let ratio = ratio as u64;
    [Fault::BlockSize(ratio), Fault::Layout, Fault::BlockSizeAndLayout(ratio)][name]
}

fn cases() -> impl Strategy<Value = Case> {
    let sizes = (1_usize..5, 1_usize..5, 1_usize..6, 1_usize..6, 0_usize..9);
    let kind = (0_usize..3, any::<bool>(), prop::sample::select(vec![1_usize, 2, 3, 8]));
    (sizes, kind).prop_flat_map(
        |((rows, ratio, part_tokens, heads, elements), (name, has_planes, item_bytes))| {
            let planes = if has_planes && name == 1 { vec![2] } else { vec![] };
            let sizes = [&[rows], planes.as_slice(), &[ratio * part_tokens, heads, elements]].concat();
            let order = Just((0..sizes.len()).collect::<Vec<usize>>()).prop_shuffle();
            let gaps = prop::collection::vec(prop_oneof![Just(0_usize), 0_usize..4], sizes.len());
            let shuffled = Just((0..rows).collect::<Vec<usize>>()).prop_shuffle();
            (order, gaps, shuffled, 0..=rows).prop_map(move |(order, gaps, rows, named)| {
                Case::new(&sizes, item_bytes, &order, &gaps, &rows[..named], fault(name, ratio))
            })
        },
    )
}

proptest! {
    #[test]
    fn a_matrix_is_transposed_alike_through_scratch_and_item_by_item(case in cases()) {
        let before = case.memory();
        let expected = case.by_hand(&before);
        let mut memory = before.clone();
        let asked = case.bind(&mut memory);
        // SAFETY: the memory is this test's, and lives on.
        unsafe { repair(&asked, None) };
        prop_assert_eq!(&memory, &expected);

        let mut memory = before;
        let asked = case.bind(&mut memory);
        let mut matrix = Matrix::new(&asked.transposition, SCRATCH_BYTES + 1);
        let [planes, parts] = asked.matrices;
        for row in &asked.rows {
            for (plane, part) in (0..planes.count).flat_map(|plane| (0..parts.count).map(move |part| (plane, part))) {
                // SAFETY: as above.
                unsafe { matrix.transpose_at(asked.region.address + row + plane * planes.stride + part * parts.stride) };
            }
        }
        prop_assert_eq!(&memory, &expected);
    }
}

#[test]
fn rows_that_outgrow_the_scratch_memory() {
    for (tokens, heads, elements, order) in [
        (96, 48, 125, [0, 1, 2, 3]),
        (96, 48, 125, [0, 2, 1, 3]),
        (4, 3, 50_000, [1, 0, 3, 2]), // few items, each of them long
    ] {
        for name in 0..3 {
            let sizes = [2, tokens, heads, elements];
            let case = Case::new(&sizes, 8, &order, &[0, 0, 1, 0], &[1], fault(name, 4));
            let mut memory = case.memory();
            let expected = case.by_hand(&memory);
            let asked = case.bind(&mut memory);
            // SAFETY: the memory is this test's, and lives on.
            unsafe { repair(&asked, Some(2)) };
            assert!(memory == expected, "{sizes:?} in the order {order:?}, {:?}", case.fault);
        }
    }
}
