//! Matrices: what a repair transposes, cut so that each fits where it is turned.
//!
//! A transposition moves whole items, so that a matrix of long items is as many matrices of their parts.
//! Each is read into a block's shared memory and written back from there; a matrix whose items do not fit
//! however they are cut goes through device memory, by two copies.

use kvferry_core::copies::repair::{Repair, Step, Transposition};
use kvferry_core::moves::schedule::BlockTable;
use kvferry_core::{Error, Result};

use crate::job::{Job, step_bits, vector_bytes};
use crate::records::{self, MATRIX_STEPS, MatrixStep, narrow};

/// Bytes of device memory through which matrices go that do not fit in a block's: enough for one of as many
/// two-byte elements as a repair can have items, and for many of usual size.
pub const DEVICE_SCRATCH_BYTES: u64 = 128 << 20;

/// A repair's matrices, of which each has a limited number of bytes.
#[derive(Clone, Debug)]
pub struct Matrices<'a> {
    repair: &'a Repair,
    transposition: Transposition,
    steps: [Step; MATRIX_STEPS],
}

impl<'a> Matrices<'a> {
    /// Cuts items into equal parts until a matrix of them fits in `limit_bytes`; `None` where not even one
    /// of single elements does.
    pub fn cut(repair: &'a Repair, limit_bytes: u64) -> Option<Self> {
        let mut transposition = repair.transposition;
        let most_elements = limit_bytes / transposition.items() / transposition.element_bytes;
        let [around, elements] = transposition.item;
        let (around, around_parts) = cut(around, (most_elements / elements.count).max(1));
        let (elements, element_parts) = cut(elements, most_elements / around.count);
        transposition.item = [around, elements];
        let [planes, parts] = repair.matrices;
        let steps = [planes, parts, around_parts, element_parts];
        (most_elements > 0).then_some(Self { repair, transposition, steps })
    }

    /// Bytes of one.
    pub fn matrix_bytes(&self) -> u64 {
        self.transposition.items() * self.transposition.item_bytes()
    }

    /// Bytes that are contiguous where an item is written.
    pub fn run_bytes(&self) -> u64 {
        self.transposition.scatter().run_bytes
    }

    /// How many there are.
    pub fn count(&self) -> u64 {
        self.repair.rows.len() as u64 * self.steps.iter().map(|step| step.count).product::<u64>()
    }

    /// What a kernel needs, the rows' memory being at `address`.
    pub fn record(&self, address: u64) -> records::Transposition {
        let (gather, scatter) = (self.transposition.gather(), self.transposition.scatter());
        let rows = self.repair.rows.iter().fold(address, |bits, row| bits | row);
        let steps =
            self.steps.iter().filter(|step| step.count > 1).fold(rows, |bits, step| bits | step.stride);
        let vector_bytes = vector_bytes(steps | step_bits(&gather) | step_bits(&scatter));
        records::Transposition {
            address,
            num_matrices: self.count(),
            steps: self.steps.map(|step| MatrixStep { count: step.count, stride: step.stride }),
            matrix_vectors: narrow(self.matrix_bytes() / vector_bytes),
            vector_bytes: narrow(vector_bytes),
            gather: records::Strided::new(&gather, vector_bytes),
            scatter: records::Strided::new(&scatter, vector_bytes),
        }
    }

    /// Pairs of jobs for blocks of so many threads, to be run one after another: a batch of matrices out of
    /// the rows' memory at `address` into scratch memory of `scratch_bytes`, and back to where they belong.
    pub fn batches(
        &self,
        address: u64,
        scratch: u64,
        scratch_bytes: u64,
        threads: u32,
    ) -> impl Iterator<Item = Result<[Job; 2]>> {
        let matrix_bytes = self.matrix_bytes();
        let batch = (scratch_bytes / matrix_bytes).max(1);
        let (gather, scatter) = (self.transposition.gather(), self.transposition.scatter());
        (0..self.count().div_ceil(batch)).map(move |index| {
            let first = index * batch;
            let matrices = first..(first + batch).min(self.count());
            let packed: Vec<u64> = matrices.clone().map(|matrix| (matrix - first) * matrix_bytes).collect();
            let placed: Vec<u64> = matrices.map(|matrix| self.offset(matrix)).collect();
            let job = |strided, source, target, table: BlockTable| {
                let mut job = Job::new(threads);
                job.push_table(&table);
                let entries = job.entries(0..table.source.len());
                job.push(strided, source, target, &entries).map(|()| job)
            };
            let out = BlockTable { source: placed.clone(), target: packed.clone() };
            let back = BlockTable { source: packed, target: placed };
            Ok([job(&gather, address, scratch, out)?, job(&scatter, scratch, address, back)?])
        })
    }

    /// Bytes from the tensor's first to a matrix.
    fn offset(&self, mut matrix: u64) -> u64 {
        let mut offset = 0;
        for step in self.steps.iter().rev() {
            offset += matrix % step.count * step.stride;
            matrix /= step.count;
        }
        offset + self.repair.rows[usize::try_from(matrix).expect("the index of a row")]
    }
}

/// Matrices that fit in so many bytes of device memory.
pub fn through_device_memory(repair: &Repair, limit_bytes: u64) -> Result<Matrices<'_>> {
    Matrices::cut(repair, limit_bytes).ok_or_else(|| {
        let Transposition { element_bytes, .. } = repair.transposition;
        Error::Memory(format!(
            "{} has blocks of {} items of at least {element_bytes} bytes, which do not fit in {limit_bytes}",
            repair.region.name,
            repair.transposition.items()
        ))
    })
}

/// Cuts a step into equal parts, of at most `most` each where that can be; what leads through a part, and
/// from one part to the next.
fn cut(step: Step, most: u64) -> (Step, Step) {
    let count = largest_divisor(step.count, most);
    let part = Step { count, stride: step.stride };
    (part, Step { count: step.count / count, stride: count * step.stride })
}

/// The largest divisor of a number up to `most`, or one.
fn largest_divisor(number: u64, most: u64) -> u64 {
    let roots = (1..).take_while(|root| root * root <= number).filter(|root| number.is_multiple_of(*root));
    let divisors = roots.flat_map(|root| [root, number / root]);
    divisors.filter(|divisor| *divisor <= most).max().unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use kvferry_core::copies::repair::Fault;
    use kvferry_core::copies::view::View;
    use kvferry_core::memory::tensor::{Device, RawTensor};

    use super::*;

    fn repair([tokens, heads, elements]: [i64; 3], fault: Fault) -> Repair {
        let strides = vec![tokens * heads * elements * 2, heads * elements * 2, elements * 2, 2];
        let shape = vec![3, tokens, heads, elements];
        let (device, item_bytes) = (Device::CPU, 2);
        let raw = RawTensor { address: 0, shape, strides, item_bytes, device, writable: true };
        Repair::new(&View::new("cache", &raw).unwrap(), &[0, 2], fault).unwrap()
    }

    #[test]
    fn divisors_are_the_largest_that_fit() {
        for (number, most, divisor) in
            [(12, 12, 12), (12, 11, 6), (12, 5, 4), (13, 12, 1), (1, 0, 1), (9, 8, 3)]
        {
            assert_eq!(largest_divisor(number, most), divisor, "{number} up to {most}");
        }
    }

    #[test]
    fn items_are_cut_until_a_matrix_fits() {
        let repair = repair([64, 8, 128], Fault::Layout); // 128 KiB a block
        let whole = Matrices::cut(&repair, 128 << 10).unwrap();
        assert_eq!((whole.matrix_bytes(), whole.count()), (128 << 10, 2));
        let halves = Matrices::cut(&repair, (128 << 10) - 1).unwrap();
        assert_eq!((halves.matrix_bytes(), halves.count()), (64 << 10, 4));
        assert_eq!((halves.offset(1), halves.offset(2)), (128, 2 * (128 << 10)));
        let elements = Matrices::cut(&repair, 1024).unwrap();
        assert_eq!((elements.matrix_bytes(), elements.count()), (1024, 256));
        assert!(Matrices::cut(&repair, 1023).is_none());
        assert!(matches!(through_device_memory(&repair, 1023), Err(Error::Memory(_))));
    }

    #[test]
    fn runs_are_kept_whole_while_tokens_can_be_cut() {
        let repair = repair([64, 8, 128], Fault::BlockSize(4)); // 16 tokens of 256 bytes an item
        let tokens = Matrices::cut(&repair, 32 << 10).unwrap();
        assert_eq!(tokens.transposition.item.map(|step| step.count), [4, 128]);
        let record = tokens.record(0);
        assert_eq!((record.num_matrices, record.vector_bytes, record.matrix_vectors), (8, 16, 2048));
        assert_eq!(
            Matrices::cut(&repair, 4 << 10).unwrap().transposition.item.map(|step| step.count),
            [1, 64]
        );
    }

    #[test]
    fn batches_hold_what_fits() {
        let repair = repair([64, 8, 128], Fault::Layout);
        let matrices = Matrices::cut(&repair, 64 << 10).unwrap();
        let sizes = |scratch_bytes| -> Vec<usize> {
            let batches = matrices.batches(0, 1 << 40, scratch_bytes, 256);
            batches.map(|jobs| jobs.unwrap()[1].table.len()).collect()
        };
        assert_eq!(sizes(200 << 10), [3, 1]);
        assert_eq!(sizes(64 << 10), [1, 1, 1, 1]);
    }
}
