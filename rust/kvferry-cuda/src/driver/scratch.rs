//! Scratch memory of a device, which a stream has between two points of its order.

use cudarc::driver::sys;
use kvferry_core::Result;

use crate::driver::check;
use crate::driver::stream::Stream;

/// Memory that is freed on its stream, behind everything that was enqueued while this lived.
#[derive(Debug)]
pub struct Scratch {
    /// Its first byte.
    pub address: u64,
    stream: Stream,
}

impl Scratch {
    /// # Safety
    ///
    /// The stream must exist until this is dropped, and its device's context be current.
    pub unsafe fn new(num_bytes: u64, stream: Stream) -> Result<Self> {
        let mut address = 0;
        let size = usize::try_from(num_bytes).unwrap_or(usize::MAX);
        // SAFETY: the caller guarantees the stream.
        let answer = unsafe { sys::cuMemAllocAsync(&raw mut address, size, stream.handle()) };
        check(answer, &format!("allocating {num_bytes} bytes of scratch memory"))?;
        Ok(Self { address, stream })
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: the memory is this one's; what uses it was enqueued before. Where the driver refuses, the
        // device has failed, which the next call is told.
        let _ = unsafe { sys::cuMemFreeAsync(self.address, self.stream.handle()) };
    }
}
