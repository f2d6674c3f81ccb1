//! Records: what kernels read, laid out as `cuda/include/kvferry/records.cuh` declares it.

use std::slice;

use kvferry_core::moves::strided::{self, MAX_DIMS};

/// Steps that lead from one matrix of a row to the next: the repair's own, and those along an item that is
/// cut.
pub const MATRIX_STEPS: usize = 4;

/// A number that kernels divide by with a product and a shift, for numbers below 2^31.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Divisor {
    value: u32,
    multiplier: u32,
    shift: u32,
}

impl Divisor {
    /// The largest: sums with what a tile adds then stay below 2^31.
    pub const MAX: u64 = 1 << 30;

    /// # Panics
    ///
    /// If `value` is zero or larger than [`Self::MAX`].
    pub fn new(value: u64) -> Self {
        assert!((1..=Self::MAX).contains(&value), "a divisor of {value}");
        // For numbers below 2^31, 31 bits and the logarithm, rounded up, give an exact quotient.
        let power = value.next_power_of_two();
        let shift = 31 + power.trailing_zeros();
        // Most are powers of two, which need no division.
        let multiplier = if power == value { 1 << 31 } else { (1_u64 << shift).div_ceil(value) };
        Self { value: narrow(value), multiplier: narrow(multiplier), shift }
    }
}

/// One loop dimension, with its strides in bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    count: Divisor,
    padding: u32,
    source_stride: u64,
    target_stride: u64,
}

/// A contiguous run, and the dimensions that repeat it, outermost first.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strided {
    run_vectors: Divisor,
    unused_dims: u32,
    dims: [Step; MAX_DIMS],
}

impl Strided {
    /// Of what the core loops over, in vectors of so many bytes.
    pub fn new(strided: &strided::Strided, vector_bytes: u64) -> Self {
        let dims = strided.dims.map(|dim| Step {
            count: Divisor::new(dim.count),
            padding: 0,
            source_stride: dim.source_stride,
            target_stride: dim.target_stride,
        });
        Self {
            run_vectors: Divisor::new(strided.run_bytes / vector_bytes),
            unused_dims: narrow((MAX_DIMS - strided.looping().len()) as u64),
            dims,
        }
    }
}

/// Byte offsets of one piece of a block.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    pub source: u64,
    pub target: u64,
}

/// A strided copy at every entry of a slice of a table, as a sequence of vectors cut into tiles.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Loop {
    pub source: u64,
    pub target: u64,
    pub first_entry: u64,
    pub first_tile: u64,
    pub num_vectors: u64,
    pub vector_bytes: u32,
    pub entry_runs: Divisor,
    pub strided: Strided,
}

/// A contiguous copy of any length and alignment.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    pub source: u64,
    pub target: u64,
    pub num_bytes: u64,
    pub first_tile: u64,
}

/// A step of `stride` bytes, taken `count` times.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MatrixStep {
    pub count: u64,
    pub stride: u64,
}

/// Matrices that are transposed in place: gathered in the order of their places, scattered to where they
/// belong.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transposition {
    pub address: u64,
    pub num_matrices: u64,
    pub steps: [MatrixStep; MATRIX_STEPS],
    pub matrix_vectors: u32,
    pub vector_bytes: u32,
    pub gather: Strided,
    pub scatter: Strided,
}

/// What the loop kernel is called with; addresses are the device's.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CopyLoops {
    pub loops: u64,
    pub table: u64,
    pub num_tiles: u64,
    pub num_loops: u32,
}

/// What the run kernel is called with.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct CopyRuns {
    pub runs: u64,
    pub num_tiles: u64,
    pub num_runs: u32,
}

/// What the transposing kernel is called with.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Transpose {
    pub transposition: u64,
    pub rows: u64,
}

/// What kernels read as it lies in memory.
///
/// # Safety
///
/// Every byte of it must have a value: no padding, and no pointers.
pub unsafe trait Record: Copy {}
// SAFETY: the layouts of `records.cuh`, whose sizes are the sums of their fields' (`layouts_have_no_padding`).
unsafe impl Record for Entry {}
// SAFETY: as above.
unsafe impl Record for Loop {}
// SAFETY: as above.
unsafe impl Record for Run {}
// SAFETY: as above.
unsafe impl Record for Transposition {}
// SAFETY: a number.
unsafe impl Record for u64 {}

/// Records as bytes.
pub fn bytes<T: Record>(records: &[T]) -> &[u8] {
    // SAFETY: a record's bytes all have values, and live as long as `records`.
    unsafe { slice::from_raw_parts(records.as_ptr().cast(), size_of_val(records)) }
}

/// A number that was bounded.
pub fn narrow(number: u64) -> u32 {
    u32::try_from(number).expect("a number that was bounded by 32 bits")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    impl Divisor {
        fn divide(self, number: u32) -> u64 {
            (u64::from(number) * u64::from(self.multiplier)) >> self.shift
        }
    }

    #[test]
    fn layouts_have_no_padding() {
        let step = 12 + 4 + 2 * 8;
        let strided = 12 + 4 + MAX_DIMS * step;
        assert_eq!(size_of::<Step>(), step);
        assert_eq!(size_of::<Strided>(), strided);
        assert_eq!(size_of::<Entry>(), 2 * 8);
        assert_eq!(size_of::<Loop>(), 5 * 8 + 4 + 12 + strided);
        assert_eq!(size_of::<Run>(), 4 * 8);
        assert_eq!(size_of::<Transposition>(), 2 * 8 + MATRIX_STEPS * 16 + 2 * 4 + 2 * strided);
    }

    #[test]
    fn quotients_are_exact_at_the_limits() {
        for value in [1, 2, 3, 5, 7, 641, 1 << 29, (1 << 30) - 1, 1 << 30] {
            let divisor = Divisor::new(value);
            let multiples = (0..4).map(|times| times * value).chain([(1 << 31) / value * value]);
            for number in multiples.flat_map(|multiple| [multiple.saturating_sub(1), multiple, multiple + 1])
            {
                let number = number.min((1 << 31) - 1);
                assert_eq!(divisor.divide(narrow(number)), number / value, "{number} / {value}");
            }
        }
    }

    proptest! {
        #[test]
        fn quotients_are_exact(value in 1..=Divisor::MAX, bits in 0_u32..31, number in 0_u32..1 << 31) {
            let value = (value >> bits).max(1);
            prop_assert_eq!(Divisor::new(value).divide(number), u64::from(number) / value);
        }
    }
}
