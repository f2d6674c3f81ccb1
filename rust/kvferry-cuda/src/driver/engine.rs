//! The copy engine: contiguous pieces, in batches where the driver takes them.

use std::ffi::{CStr, c_int, c_void};
use std::sync::OnceLock;
use std::{mem, ptr};

use cudarc::driver::sys::{
    self, CUdeviceptr, CUmemLocation, CUmemLocationType, CUmemcpyAttributes, CUmemcpySrcAccessOrder,
    CUresult, CUstream,
};
use kvferry_core::Result;

use crate::driver::check;
use crate::driver::stream::Stream;

/// Pieces of one batch.
const BATCH: usize = 1 << 16;

/// Contiguous copies on a stream, enqueued batch by batch.
#[derive(Debug)]
pub struct Pieces {
    stream: Stream,
    batches: Option<Batch>,
    sources: Vec<u64>,
    targets: Vec<u64>,
    sizes: Vec<usize>,
    /// The first piece that the next one may continue.
    first_in_tensors: usize,
}

/// The function that takes a batch.
#[derive(Clone, Copy, Debug)]
enum Batch {
    Current(CurrentBatch),
    Earlier(EarlierBatch),
}

/// As it is from CUDA 13.0 on.
type CurrentBatch = unsafe extern "C" fn(
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

impl Pieces {
    /// None yet. Default streams and graphs refuse batches.
    pub fn new(stream: Stream, is_captured: bool) -> Self {
        let batches = if stream.is_default() || is_captured { None } else { batch() };
        let (sources, targets, sizes) = (Vec::new(), Vec::new(), Vec::new());
        Self { stream, batches, sources, targets, sizes, first_in_tensors: 0 }
    }

    /// Says that the next piece lies in other tensors: the engine takes no piece that spans two of them.
    pub fn begin_tensors(&mut self) {
        self.first_in_tensors = self.sizes.len();
    }

    /// Adds a piece, or makes the last one longer where it ends here on both sides.
    ///
    /// # Safety
    ///
    /// The stream must exist and its device's context be current; until the stream has passed, every piece
    /// must be valid for reads at its source and for writes at its target.
    pub unsafe fn push(&mut self, source: u64, target: u64, num_bytes: u64) -> Result<()> {
        let size = usize::try_from(num_bytes).expect("bytes of memory");
        let last = self.sizes.len().checked_sub(1).filter(|last| *last >= self.first_in_tensors);
        if let Some(last) = last {
            let last_bytes = self.sizes[last] as u64;
            if (self.sources[last] + last_bytes, self.targets[last] + last_bytes) == (source, target) {
                self.sizes[last] += size;
                return Ok(());
            }
        }
        if self.sizes.len() == BATCH {
            // SAFETY: the caller guarantees pieces and stream.
            unsafe { self.enqueue()? };
        }
        self.sources.push(source);
        self.targets.push(target);
        self.sizes.push(size);
        Ok(())
    }

    /// Enqueues what was pushed and is not yet.
    ///
    /// # Safety
    ///
    /// As for [`Self::push`].
    pub unsafe fn enqueue(&mut self) -> Result<()> {
        // SAFETY: the caller guarantees pieces and stream. What a refused batch has begun may be copied once
        // more: nothing else writes there.
        let answer = unsafe {
            match self.batches.map(|batch| self.enqueue_batch(batch)) {
                Some(CUresult::CUDA_SUCCESS) => CUresult::CUDA_SUCCESS,
                _ => self.enqueue_each(),
            }
        };
        self.sources.clear();
        self.targets.clear();
        self.sizes.clear();
        self.first_in_tensors = 0;
        check(answer, "copying by the copy engine")
    }

    /// # Safety
    ///
    /// As for [`Self::push`].
    unsafe fn enqueue_batch(&mut self, batch: Batch) -> CUresult {
        if self.sizes.is_empty() {
            return CUresult::CUDA_SUCCESS;
        }
        let nowhere = CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
        let mut attributes = CUmemcpyAttributes {
            // What was enqueued before may write the sources.
            srcAccessOrder: CUmemcpySrcAccessOrder::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            srcLocHint: nowhere,
            dstLocHint: nowhere,
            flags: 0,
        };
        let mut first = 0; // the attributes hold from the first piece on
        let Self { sources, targets, sizes, stream, .. } = self;
        let (to, from, bytes) = (targets.as_mut_ptr(), sources.as_mut_ptr(), sizes.as_mut_ptr());
        let (attributes, first, mut failed) = (&raw mut attributes, &raw mut first, 0);
        let (count, stream) = (sizes.len(), stream.handle());
        // SAFETY: the caller guarantees pieces and stream; the arrays are as long as said, and read at once.
        unsafe {
            match batch {
                Batch::Current(batch) => batch(to, from, bytes, count, attributes, first, 1, stream),
                Batch::Earlier(batch) => {
                    batch(to, from, bytes, count, attributes, first, 1, &raw mut failed, stream)
                }
            }
        }
    }

    /// # Safety
    ///
    /// As for [`Self::push`].
    unsafe fn enqueue_each(&self) -> CUresult {
        for ((source, target), bytes) in self.sources.iter().zip(&self.targets).zip(&self.sizes) {
            // SAFETY: the caller guarantees pieces and stream.
            let answer = unsafe { sys::cuMemcpyAsync(*target, *source, *bytes, self.stream.handle()) };
            if answer != CUresult::CUDA_SUCCESS {
                return answer;
            }
        }
        CUresult::CUDA_SUCCESS
    }
}

/// The function that takes a batch, as this driver has it.
fn batch() -> Option<Batch> {
    static FOUND: OnceLock<Option<Batch>> = OnceLock::new();
    *FOUND.get_or_init(|| {
        // SAFETY: these are its signatures in those versions.
        unsafe {
            if let Some(function) = look_up(c"cuMemcpyBatchAsync", 13000) {
                return Some(Batch::Current(mem::transmute::<*mut c_void, CurrentBatch>(function)));
            }
            let function = look_up(c"cuMemcpyBatchAsync", 12080)?;
            Some(Batch::Earlier(mem::transmute::<*mut c_void, EarlierBatch>(function)))
        }
    })
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
    use libloading::os::unix::{Library, RTLD_NOW};

    use super::*;
    use crate::emulated::DRIVER;

    #[test]
    fn pieces_that_follow_on_both_sides_are_one_within_their_tensors() {
        let mut pieces = Pieces::new(Stream(0), false);
        let push = |pieces: &mut Pieces, source, target| {
            // SAFETY: nothing is enqueued.
            unsafe { pieces.push(source, target, 10).unwrap() };
        };
        for (source, target) in [(0, 100), (10, 110), (20, 130), (30, 140), (50, 150)] {
            push(&mut pieces, source, target);
        }
        pieces.begin_tensors();
        push(&mut pieces, 60, 160);
        assert_eq!(pieces.sizes, [20, 20, 10, 10]);
        assert_eq!((pieces.sources, pieces.targets), (vec![0, 20, 50, 60], vec![100, 130, 150, 160]));
    }

    #[test]
    fn drivers_of_an_earlier_version_take_batches_as_they_knew_them() {
        const PIECES: u64 = 70_000; // two batches
        let (mut context, mut stream, mut memory) = (ptr::null_mut(), ptr::null_mut(), 0);
        let done = |answer: CUresult| assert_eq!(answer, CUresult::CUDA_SUCCESS);
        // SAFETY: the emulated driver takes the place of any other, and its memory is the host's.
        let written = unsafe {
            let driver = Library::open(Some(DRIVER), RTLD_NOW).unwrap();
            driver.get::<extern "C" fn(c_int, c_int)>(b"kvferry_emulated_pretend").unwrap()(12080, 9);
            mem::forget(driver);
            done(sys::cuDevicePrimaryCtxRetain(&raw mut context, 0));
            done(sys::cuCtxPushCurrent_v2(context));
            done(sys::cuStreamCreate(&raw mut stream, 1));
            done(sys::cuMemAlloc_v2(&raw mut memory, usize::try_from(3 * PIECES).unwrap()));
            let bytes: &mut [u8] = std::slice::from_raw_parts_mut(
                ptr::with_exposed_provenance_mut(usize::try_from(memory).unwrap()),
                usize::try_from(3 * PIECES).unwrap(),
            );
            bytes.iter_mut().zip((0..=250).cycle()).for_each(|(byte, number)| *byte = number);
            let mut pieces = Pieces::new(Stream(stream.expose_provenance() as u64), false);
            assert!(matches!(pieces.batches, Some(Batch::Earlier(_))));
            for index in 0..PIECES {
                pieces.push(memory + index, memory + PIECES + 2 * index, 1).unwrap();
            }
            pieces.enqueue().unwrap();
            done(sys::cuStreamSynchronize(stream));
            bytes
        };
        let (source, target) = written.split_at(usize::try_from(PIECES).unwrap());
        assert!(source.iter().zip(target.iter().step_by(2)).all(|(read, written)| read == written));
    }
}
