//! Streams: what callers hand over as a number, and the state that calls on one depend on.

use std::ptr;

use cudarc::driver::sys::{
    self, CUcontext, CUresult, CUstream, CUstreamCaptureMode, CUstreamCaptureStatus as Status,
};
use kvferry_core::{Error, Result};

use crate::driver::check;

/// The largest number that names a default stream of the current device instead of one that was made.
const LAST_DEFAULT: u64 = 2;

/// A stream, as frameworks hand it over: the driver's handle, or 0, 1 or 2 for a default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stream(pub u64);

impl Stream {
    /// What the driver calls it.
    pub(crate) fn handle(self) -> CUstream {
        ptr::with_exposed_provenance_mut(usize::try_from(self.0).unwrap_or(usize::MAX))
    }

    /// Whether it is a default stream, which every device has.
    pub(crate) fn is_default(self) -> bool {
        self.0 <= LAST_DEFAULT
    }

    /// The driver's number for it, which no other stream ever gets.
    ///
    /// # Safety
    ///
    /// The stream must exist, and its device's context be current.
    pub(crate) unsafe fn id(self) -> Result<u64> {
        let mut id = 0;
        // SAFETY: the caller guarantees the stream.
        check(unsafe { sys::cuStreamGetId(self.handle(), &raw mut id) }, "asking for the stream's number")?;
        Ok(id)
    }

    /// The context that a stream was made in.
    ///
    /// # Safety
    ///
    /// The stream must exist and be no default stream.
    pub(crate) unsafe fn context(self) -> Result<CUcontext> {
        let mut context = ptr::null_mut();
        // SAFETY: the caller guarantees the stream.
        let answer = unsafe { sys::cuStreamGetCtx(self.handle(), &raw mut context) };
        check(answer, "asking for the stream's device")?;
        Ok(context)
    }

    /// Whether calls on it are recorded into a graph instead of run.
    ///
    /// # Safety
    ///
    /// The stream must exist, and its device's context be current.
    pub(crate) unsafe fn is_captured(self) -> Result<bool> {
        let mut status = Status::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the caller guarantees the stream.
        match unsafe { sys::cuStreamIsCapturing(self.handle(), &raw mut status) } {
            CUresult::CUDA_ERROR_STREAM_CAPTURE_IMPLICIT => Err(Error::Value(
                "the default stream cannot be used while another stream is captured; pass that one"
                    .to_owned(),
            )),
            answer => {
                check(answer, "asking whether the stream is captured")?;
                Ok(status != Status::CU_STREAM_CAPTURE_STATUS_NONE)
            }
        }
    }
}

/// Lets this thread ask for events and memory while any stream is captured, until dropped. None of it ends up
/// in a graph, since nothing of it is enqueued on a stream.
pub struct Uncaptured(CUstreamCaptureMode);

impl Uncaptured {
    /// `None` where the driver answers only once the thread has a context.
    pub fn begin() -> Result<Option<Self>> {
        let mut mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the library is there; the mode is this thread's.
        match unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut mode) } {
            CUresult::CUDA_ERROR_INVALID_CONTEXT => Ok(None),
            answer => check(answer, "preparing for captured streams").map(|()| Some(Self(mode))),
        }
    }
}

impl Drop for Uncaptured {
    fn drop(&mut self) {
        // SAFETY: as in `begin`. It cannot fail where it did not the first time.
        let _ = unsafe { sys::cuThreadExchangeStreamCaptureMode(&raw mut self.0) };
    }
}
