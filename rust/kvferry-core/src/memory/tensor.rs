//! Registered tensors: addresses, sizes and strides, checked against the slot that they fill.

use std::fmt;

use crate::error::{Result, counted, fail};
use crate::specs::layout::Axis;
use crate::specs::slot::TensorSlot;

/// Where memory lives, in `DLPack`'s numbering.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// Device type, such as 1 for host memory.
    pub kind: i32,
    /// Device index.
    pub index: i32,
}

impl Device {
    /// Ordinary host memory.
    pub const CPU: Self = Self { kind: 1, index: 0 };
    /// The kind of memory of a GPU.
    pub const CUDA: i32 = 2;
    /// Host memory that a GPU can address.
    const CUDA_HOST: i32 = 3;
    /// The kind of memory that the driver moves between host and GPUs.
    pub const CUDA_MANAGED: i32 = 13;

    /// Whether the host reads and writes it directly.
    pub fn is_host(self) -> bool {
        self.kind == Self::CPU.kind || self.kind == Self::CUDA_HOST
    }

    /// Whether it is copied on a stream.
    pub fn is_cuda(self) -> bool {
        self.kind == Self::CUDA || self.kind == Self::CUDA_MANAGED
    }
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.kind {
            1 => f.write_str("cpu"),
            Self::CUDA => write!(f, "cuda:{}", self.index),
            Self::CUDA_HOST => f.write_str("pinned host"),
            Self::CUDA_MANAGED => f.write_str("managed CUDA memory"),
            kind => {
                // Others that frameworks export, by their numbers in `dlpack.h`.
                let name = match kind {
                    4 => "OpenCL, ",
                    7 => "Vulkan, ",
                    8 => "Metal, ",
                    10 => "ROCm, ",
                    11 => "ROCm host, ",
                    14 => "oneAPI, ",
                    15 => "WebGPU, ",
                    _ => "",
                };
                write!(f, "{name}DLPack device ({kind}, {})", self.index)
            }
        }
    }
}

/// A tensor as its producer describes it: dimensions in the producer's order, strides in bytes.
#[derive(Clone, Debug)]
pub struct RawTensor {
    /// First byte.
    pub address: u64,
    /// Items along each dimension.
    pub shape: Vec<i64>,
    /// Bytes from one item to the next along each dimension.
    pub strides: Vec<i64>,
    /// Bytes of one item.
    pub item_bytes: u64,
    /// Where it lives.
    pub device: Device,
    /// Whether it may be a target.
    pub writable: bool,
}

/// A tensor that fills its slot; dimensions are in memory order, one an axis of the slot's layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// First byte.
    pub address: u64,
    /// Items along each axis.
    pub sizes: Vec<u64>,
    /// Bytes from one item to the next along each axis; zero where the size is one.
    pub strides: Vec<u64>,
    /// Where it lives.
    pub device: Device,
    /// Whether it may be a target.
    pub writable: bool,
}

impl Tensor {
    /// Checks a producer's tensor against its slot. `axes` names the producer's dimensions where they
    /// are not in memory order.
    pub fn register(slot: &TensorSlot, raw: &RawTensor, axes: Option<&str>) -> Result<Self> {
        let name = &slot.name;
        let axis_count = slot.layout.axes().len();
        if raw.shape.len() != axis_count || raw.strides.len() != axis_count {
            fail!(
                Layout,
                "tensor {name:?} has {}, layout \"{}\" has {axis_count}; pass a view with one an axis",
                counted(raw.shape.len(), "dimension"),
                slot.layout
            );
        }
        if raw.item_bytes != slot.item_bytes {
            fail!(
                Layout,
                "tensor {name:?} has items of {}, its dtype has {}; pass a view of that item size",
                counted(raw.item_bytes, "byte"),
                slot.item_bytes
            );
        }
        let positions = match axes {
            Some(axes) => slot.layout.positions_in(axes)?,
            None => (0..axis_count).collect(),
        };
        let sizes = positions.iter().map(|&dim| raw.shape[dim]);
        let sizes = checked_sizes(slot, &sizes.collect::<Vec<_>>())?;
        let strides = positions.iter().map(|&dim| raw.strides[dim]).collect::<Vec<_>>();
        let strides = checked_strides(slot, &sizes, &strides)?;
        let tensor =
            Self { address: raw.address, sizes, strides, device: raw.device, writable: raw.writable };
        tensor.check_address(slot)?;
        Ok(tensor)
    }

    /// A tensor without padding, of `blocks` blocks, at address zero.
    pub fn dense(slot: &TensorSlot, blocks: u64) -> Result<Self> {
        let mut sizes = slot.sizes.clone();
        sizes[slot.block_axis()] = blocks;
        let mut strides = vec![0; sizes.len()];
        let mut stride = slot.item_bytes;
        for (axis, size) in sizes.iter().enumerate().rev() {
            strides[axis] = stride;
            stride = match stride.checked_mul((*size).max(1)) {
                Some(bytes) if i64::try_from(bytes).is_ok() => bytes,
                _ => fail!(Value, "tensor {:?} of {blocks} blocks exceeds 2^63 bytes", slot.name),
            };
        }
        Ok(Self { address: 0, sizes, strides, device: Device::CPU, writable: true })
    }

    /// Bytes from its first to one past its last, padding in between included.
    pub fn extent_bytes(&self, item_bytes: u64) -> u64 {
        if self.sizes.contains(&0) {
            return 0;
        }
        let last: u64 = self.sizes.iter().zip(&self.strides).map(|(size, stride)| (size - 1) * stride).sum();
        last + item_bytes
    }

    /// The stride of an axis of its slot's layout; zero where there is no such axis.
    pub fn stride(&self, slot: &TensorSlot, axis: Axis) -> u64 {
        slot.axis(axis).map_or(0, |index| self.strides[index])
    }

    fn check_address(&self, slot: &TensorSlot) -> Result<()> {
        let extent_bytes = self.extent_bytes(slot.item_bytes);
        if self.address.checked_add(extent_bytes).is_none() {
            fail!(
                Layout,
                "tensor {:?} of {extent_bytes} bytes at {:#x} wraps around",
                slot.name,
                self.address
            );
        }
        Ok(())
    }
}

fn checked_sizes(slot: &TensorSlot, shape: &[i64]) -> Result<Vec<u64>> {
    let mut sizes = Vec::with_capacity(shape.len());
    for (index, (&given, &due)) in shape.iter().zip(&slot.sizes).enumerate() {
        let axis = slot.layout.axes()[index];
        let Ok(size) = u64::try_from(given) else {
            fail!(Layout, "tensor {:?} has size {given} along {}", slot.name, axis.letter());
        };
        if axis == Axis::Block && size < due {
            fail!(Layout, "tensor {:?} has {}, num_blocks asks for {due}", slot.name, counted(size, "block"));
        }
        if axis != Axis::Block && size != due {
            fail!(
                Layout,
                "tensor {:?} has size {size} along {} of layout \"{}\", expected {due}",
                slot.name,
                axis.letter(),
                slot.layout
            );
        }
        sizes.push(size);
    }
    Ok(sizes)
}

/// Strides in memory order must each step over everything inside them, or elements would overlap.
fn checked_strides(slot: &TensorSlot, sizes: &[u64], strides: &[i64]) -> Result<Vec<u64>> {
    let mut checked = vec![0; sizes.len()];
    if sizes.contains(&0) {
        return Ok(checked); // no item, no step
    }
    let mut inside_bytes = i128::from(slot.item_bytes);
    for index in (0..sizes.len()).rev() {
        let (axis, size, stride) = (slot.layout.axes()[index], sizes[index], strides[index]);
        if size <= 1 {
            continue; // nothing steps along it
        }
        let name = &slot.name;
        if index + 1 == sizes.len() && i128::from(stride) != inside_bytes {
            fail!(
                Layout,
                "tensor {name:?} steps {stride} bytes along {}, its innermost axis, which must be \
                 contiguous ({inside_bytes} bytes)",
                axis.letter()
            );
        }
        if i128::from(stride) < inside_bytes {
            fail!(
                Layout,
                "tensor {name:?} steps {stride} bytes along {} of layout \"{}\", but what lies inside \
                 takes {inside_bytes}: neighbours would overlap, or the memory order is another (see axes=)",
                axis.letter(),
                slot.layout
            );
        }
        inside_bytes += i128::from(size - 1) * i128::from(stride);
        if inside_bytes > i128::from(i64::MAX) {
            fail!(Layout, "tensor {name:?} exceeds 2^63 bytes");
        }
        checked[index] = stride.unsigned_abs();
    }
    Ok(checked)
}
