//! The copy engine: contiguous pieces, in batches where the driver takes them.

use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;
use std::{mem, ptr};

use cudarc::driver::sys::{
    self, CUdeviceptr, CUmemLocation, CUmemLocationType, CUmemcpyAttributes, CUmemcpySrcAccessOrder,
    CUresult, CUstream,
};
use kvferry_core::{Error, Result};

use crate::choose::MAX_ENGINE_COPIES;
use crate::driver::check;
use crate::driver::stream::Stream;

/// Pieces of one batch.
const BATCH: usize = 1 << 16;

/// Contiguous copies between two addresses each.
#[derive(Clone, Debug, Default)]
pub struct Pieces {
    sources: Vec<u64>,
    targets: Vec<u64>,
    sizes: Vec<usize>,
    /// The first piece that the next one may continue.
    first_in_tensors: usize,
}

/// As the function is from CUDA 13.0 on.
type Batch = unsafe extern "C" fn(
    *mut CUdeviceptr,
    *mut CUdeviceptr,
    *mut usize,
    usize,
    *mut CUmemcpyAttributes,
    *mut usize,
    usize,
    CUstream,
) -> CUresult;
/// As it was in CUDA 12.8 and 12.9, where it also told which piece failed.
type EarlierBatch = unsafe extern "C" fn(
    *mut CUdeviceptr,
    *mut CUdeviceptr,
    *mut usize,
    usize,
    *mut CUmemcpyAttributes,
    *mut usize,
    usize,
    *mut usize,
    CUstream,
) -> CUresult;

#[derive(Clone, Copy, Debug)]
enum Batches {
    Current(Batch),
    Earlier(EarlierBatch),
    /// The driver is too old.
    None,
}

impl Pieces {
    /// Says that the next piece lies in other tensors: the engine takes no piece that spans two of them.
    pub fn begin_tensors(&mut self) {
        self.first_in_tensors = self.sizes.len();
    }

    /// Adds a piece, or makes the last one longer where it ends here on both sides.
    pub fn push(&mut self, source: u64, target: u64, num_bytes: u64) -> Result<()> {
        let size = usize::try_from(num_bytes).expect("bytes of memory");
        let last = self.sizes.len().checked_sub(1).filter(|last| *last >= self.first_in_tensors);
        if let Some(last) = last {
            let last_bytes = self.sizes[last] as u64;
            if (self.sources[last] + last_bytes, self.targets[last] + last_bytes) == (source, target) {
                self.sizes[last] += size;
                return Ok(());
            }
        }
        if self.sizes.len() as u64 == MAX_ENGINE_COPIES {
            return Err(Error::Value(format!(
                "more than {MAX_ENGINE_COPIES} pieces for the copy engine: host memory that is also mapped \
                 could be copied by a kernel"
            )));
        }
        self.sources.push(source);
        self.targets.push(target);
        self.sizes.push(size);
        Ok(())
    }

    /// Enqueues all copies. A batch is refused by the default streams, and by graphs.
    ///
    /// # Safety
    ///
    /// The stream must exist and its device's context be current; every piece must be valid for reads at its
    /// source and for writes at its target until the stream has passed.
    pub unsafe fn enqueue(mut self, stream: Stream, is_captured: bool) -> Result<()> {
        let batches = if stream.is_default() || is_captured { Batches::None } else { Batches::find() };
        let sizes = self.sizes.chunks_mut(BATCH);
        let ends = self.sources.chunks_mut(BATCH).zip(self.targets.chunks_mut(BATCH));
        for (sizes, (sources, targets)) in sizes.zip(ends) {
            // SAFETY: the caller guarantees pieces and stream.
            let answer = unsafe { batches.copy(targets, sources, sizes, stream.handle()) };
            check(answer, "copying by the copy engine")?;
        }
        Ok(())
    }
}

impl Batches {
    fn find() -> Self {
        static FOUND: OnceLock<Batches> = OnceLock::new();
        *FOUND.get_or_init(|| {
            if let Some(function) = look_up(c"cuMemcpyBatchAsync", 13000) {
                // SAFETY: this is its signature in that version.
                return Self::Current(unsafe { mem::transmute::<*mut c_void, Batch>(function) });
            }
            look_up(c"cuMemcpyBatchAsync", 12080).map_or(Self::None, |function| {
                // SAFETY: as above.
                Self::Earlier(unsafe { mem::transmute::<*mut c_void, EarlierBatch>(function) })
            })
        })
    }

    /// # Safety
    ///
    /// As for [`Pieces::enqueue`].
    unsafe fn copy(
        self,
        targets: &mut [CUdeviceptr],
        sources: &mut [CUdeviceptr],
        sizes: &mut [usize],
        stream: CUstream,
    ) -> CUresult {
        let nowhere = CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes = CUmemcpyAttributes {
            // What was enqueued before may write the sources.
            srcAccessOrder: CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: 0,
        };
        // The attributes hold from the first piece on.
        let (mut first, mut failed, count) = (0, 0, sizes.len());
        let (to, from, bytes) = (targets.as_mut_ptr(), sources.as_mut_ptr(), sizes.as_mut_ptr());
        let (attributes, first) = (&raw mut attributes, &raw mut first);
        // SAFETY: the caller guarantees pieces and stream; the arrays are as long as said, and read at once.
        unsafe {
            match self {
                Self::Current(batch) => batch(to, from, bytes, count, attributes, first, 1, stream),
                Self::Earlier(batch) => {
                    batch(to, from, bytes, count, attributes, first, 1, &raw mut failed, stream)
                }
                Self::None => {
                    let pieces = targets.iter().zip(sources.iter()).zip(sizes.iter());
                    let mut answers =
                        pieces.map(|((to, from), bytes)| sys::cuMemcpyAsync(*to, *from, *bytes, stream));
                    answers.find(|answer| *answer != CUresult::CUDA_SUCCESS).unwrap_or(CUresult::CUDA_SUCCESS)
                }
            }
        }
    }
}

/// A function as it is in a version of the driver's interface, if this driver has it.
fn look_up(name: &CStr, version: c_int) -> Option<*mut c_void> {
    let mut function = ptr::null_mut();
    // SAFETY: the library is there; the name ends, and the status may be left out.
    let answer =
        unsafe { sys::cuGetProcAddress_v2(name.as_ptr(), &raw mut function, version, 0, ptr::null_mut()) };
    (answer == CUresult::CUDA_SUCCESS && !function.is_null()).then_some(function)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_that_follow_on_both_sides_are_one_within_their_tensors() {
        let mut pieces = Pieces::default();
        for (source, target) in [(0, 100), (10, 110), (20, 130), (30, 140), (50, 150)] {
            pieces.push(source, target, 10).unwrap();
        }
        pieces.begin_tensors();
        pieces.push(60, 160, 10).unwrap();
        assert_eq!(pieces.sizes, [20, 20, 10, 10]);
        assert_eq!((pieces.sources, pieces.targets), (vec![0, 20, 50, 60], vec![100, 130, 150, 160]));
    }
}
