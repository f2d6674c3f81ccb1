//! Views: tensors whose dimensions step forward, in whatever order they lie in memory.

use crate::error::{Result, fail};
use crate::memory::region::Region;
use crate::memory::tensor::{Device, RawTensor};

/// A tensor as its producer hands it over, with strides that have been checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct View {
    /// What messages call it, such as `tensor "source[3]"`.
    pub name: String,
    /// First byte.
    pub address: u64,
    /// Items along each dimension.
    pub sizes: Vec<u64>,
    /// Bytes from one item to the next along each dimension; zero where nothing steps.
    pub strides: Vec<u64>,
    /// Bytes of one item.
    pub item_bytes: u64,
    /// Bytes from the first to one past the last, padding in between included.
    pub extent_bytes: u64,
    /// Where it lives.
    pub device: Device,
    /// Whether it may be a target.
    pub writable: bool,
}

impl View {
    /// Takes the tensor `name`. Its strides must be positive, except where nothing steps along them.
    pub fn new(name: &str, raw: &RawTensor) -> Result<Self> {
        let name = format!("tensor {name:?}");
        let mut sizes = Vec::with_capacity(raw.shape.len());
        for &size in &raw.shape {
            match u64::try_from(size) {
                Ok(size) => sizes.push(size),
                Err(_) => fail!(Layout, "{name} has a negative size {size}"),
            }
        }
        let is_empty = sizes.contains(&0);
        let mut strides = vec![0; sizes.len()];
        let mut extent_bytes = if is_empty { 0 } else { i128::from(raw.item_bytes) };
        for (dimension, (&size, &stride)) in sizes.iter().zip(&raw.strides).enumerate() {
            if size <= 1 || is_empty {
                continue;
            }
            if stride <= 0 {
                fail!(
                    Layout,
                    "{name} steps {stride} bytes along dimension {dimension}, which must be positive"
                );
            }
            strides[dimension] = stride.unsigned_abs();
            extent_bytes += i128::from(size - 1) * i128::from(stride);
            if extent_bytes > i128::from(i64::MAX) {
                fail!(Layout, "{name} exceeds 2^63 bytes");
            }
        }
        let extent_bytes = u64::try_from(extent_bytes).unwrap_or(u64::MAX);
        if raw.address.checked_add(extent_bytes).is_none() {
            fail!(Layout, "{name} of {extent_bytes} bytes at {:#x} wraps around", raw.address);
        }
        Ok(Self {
            name,
            address: raw.address,
            sizes,
            strides,
            item_bytes: raw.item_bytes,
            extent_bytes,
            device: raw.device,
            writable: raw.writable,
        })
    }

    /// Refuses what cannot be written: read-only memory, and elements that overlap.
    pub fn check_target(&self) -> Result<()> {
        let name = &self.name;
        if !self.writable {
            fail!(Layout, "{name} is read-only, it cannot be a target; pass a writable one");
        }
        let stepping = self.sizes.iter().zip(&self.strides).filter(|(_, stride)| **stride > 0);
        let mut by_stride: Vec<(u64, u64)> = stepping.map(|(size, stride)| (*stride, *size)).collect();
        by_stride.sort_unstable();
        let mut inside_bytes = self.item_bytes;
        for (stride, size) in by_stride {
            if stride < inside_bytes {
                fail!(
                    Layout,
                    "{name} steps {stride} bytes over what takes {inside_bytes}: its strides do not nest and \
                     elements may overlap, it cannot be a target"
                );
            }
            inside_bytes += (size - 1) * stride;
        }
        Ok(())
    }

    /// Whether both name the same elements in the same way.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        (self.address, self.item_bytes, &self.sizes, &self.strides)
            == (other.address, other.item_bytes, &other.sizes, &other.strides)
    }

    /// Its memory, of which `block_dimension` counts the blocks.
    pub fn region(&self, block_dimension: usize) -> Region {
        Region {
            name: self.name.clone(),
            address: self.address,
            extent_bytes: self.extent_bytes,
            block_stride: self.strides[block_dimension],
            device: self.device,
            writable: self.writable,
        }
    }
}
