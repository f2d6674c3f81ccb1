//! Regions: a tensor's memory as those see it who check and move bytes.

use crate::interval::Interval;
use crate::memory::tensor::Device;

/// The memory of one tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Region {
    /// What messages call it, such as `tensor "layers.0" of rank 3`.
    pub name: String,
    /// First byte.
    pub address: u64,
    /// Bytes from the first to one past the last, padding in between included.
    pub extent_bytes: u64,
    /// Bytes from one block to the next.
    pub block_stride: u64,
    /// Where it lives.
    pub device: Device,
    /// Whether it may be a target.
    pub writable: bool,
}

impl Region {
    /// The addresses from the first byte to one past the last.
    pub fn bytes(&self) -> Interval {
        Interval::new(self.address, self.address + self.extent_bytes)
    }

    /// Asserts that a copy stays inside: `span_bytes` from `offset`, and from the furthest of its entries.
    ///
    /// # Panics
    ///
    /// If it does not. Whoever binds copies to tensors rules that out; whoever executes them asks again.
    pub fn assert_reach(&self, offset: u64, furthest: Option<u64>, span_bytes: u64) {
        let Some(entry) = furthest else { return };
        let end = offset.checked_add(entry).and_then(|at| at.checked_add(span_bytes));
        let Self { name, extent_bytes, .. } = self;
        assert!(
            end.is_some_and(|end| end <= *extent_bytes),
            "a copy ends at {end:?}, past the {extent_bytes} bytes of {name}"
        );
    }
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    #[test]
    fn a_copy_may_end_with_its_tensor_and_no_later() {
        let region = Region {
            name: "memory".to_owned(),
            address: 0,
            extent_bytes: 30,
            block_stride: 10,
            device: Device::CPU,
            writable: true,
        };
        let is_inside = |offset| catch_unwind(|| region.assert_reach(offset, Some(7), 18)).is_ok();
        assert!(is_inside(5)); // 5 + 7 + 18 = 30
        assert!(!is_inside(6));
        assert!(!is_inside(u64::MAX));
        region.assert_reach(31, None, 1);
    }
}
