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
}
