//! Execution: what has been checked runs where its memory lies, on the host's threads or on a stream.

use kvferry_core::copies::repair::Repair;
use kvferry_core::moves::overlap::BoundSchedule;
use kvferry_core::{Error, Result};
use kvferry_cuda::{Memory, Placed, Stream};
use pyo3::prelude::*;
use pyo3::types::PyBool;

use crate::args;

/// How a call wants to run.
#[derive(Clone, Copy, Debug)]
pub struct Execution {
    /// The stream, for device memory; the default stream where the caller names none.
    stream: Stream,
    /// Threads of a host copy, at most.
    threads: Option<usize>,
}

impl Execution {
    /// Takes the arguments `stream` and `threads`.
    pub fn new(stream: Option<&Bound<'_, PyAny>>, threads: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let stream = stream.map_or(Ok(Stream(0)), read_stream)?;
        Ok(Self { stream, threads: args::threads(threads)? })
    }

    /// Copies what schedules that run together move. A host copy has finished when this returns; one that
    /// touches device memory has been enqueued on the stream. An error has changed nothing, unless the driver
    /// has refused what it had to enqueue behind something else. `memory` is what
    /// is known of each schedule's source and target tensors.
    ///
    /// # Safety
    ///
    /// Until the copy has finished, every region must be memory that its owner keeps alive, target regions
    /// must be writable, and no byte may be written twice, or read and written. That nobody else uses what is
    /// written meanwhile is the part of Python's callers, as for any tensor operation, and so is that the
    /// stream exists.
    pub unsafe fn copy(self, bound: &[BoundSchedule<'_>], memory: &[[&Memory; 2]]) -> Result<()> {
        if !bound.iter().all(is_on_host) {
            let placed: Vec<Placed<'_>> = bound
                .iter()
                .zip(memory)
                .map(|(&bound, &[source, target])| Placed { bound, source, target })
                .collect();
            // SAFETY: the caller guarantees memory, schedules and stream.
            return unsafe { kvferry_cuda::copy(&placed, self.stream) };
        }
        #[cfg(feature = "emulated")]
        if let Some(order) = emulated::order()? {
            // SAFETY: all memory is the host's, which the caller guarantees.
            return unsafe { kvferry_cuda::emulated::copy(bound, order) };
        }
        check_kernel()?;
        // SAFETY: as above.
        unsafe { kvferry_copy::copy(bound, self.threads) };
        Ok(())
    }

    /// Repairs rows in place, as [`Self::copy`] runs.
    ///
    /// # Safety
    ///
    /// Until the repair has finished, its region must be memory that its owner keeps alive; other use of it
    /// and the stream are the part of Python's callers.
    pub unsafe fn repair(self, repair: &Repair) -> Result<()> {
        if !repair.region.device.is_host() {
            // SAFETY: the caller guarantees memory and stream.
            return unsafe { kvferry_cuda::repair(repair, self.stream) };
        }
        #[cfg(feature = "emulated")]
        if let Some(order) = emulated::order()? {
            // SAFETY: the memory is the host's, which the caller guarantees.
            return unsafe { kvferry_cuda::emulated::repair(repair, order, emulated::SCRATCH) };
        }
        check_kernel()?;
        // SAFETY: as above.
        unsafe { kvferry_copy::repair(repair, self.threads) };
        Ok(())
    }
}

/// A stream's handle, of which 1 is one: `True` must not pass for it.
fn read_stream(stream: &Bound<'_, PyAny>) -> PyResult<Stream> {
    const WHAT: &str = "an integer in [0, 2^63); pass its handle, such as torch's stream.cuda_stream";
    match stream.extract::<i64>().map(u64::try_from) {
        Ok(Ok(handle)) if !stream.is_instance_of::<PyBool>() => Ok(Stream(handle)),
        Ok(_) => Err(args::wrong("stream", stream, WHAT)),
        Err(error) => Err(args::refused(error, stream, || args::wrong("stream", stream, WHAT))),
    }
}

/// Whether everything that a schedule touches is host memory.
fn is_on_host(bound: &BoundSchedule<'_>) -> bool {
    bound.schedule.loops.iter().all(|copy| {
        let (source, target) = (&bound.source[copy.source_tensor], &bound.target[copy.target_tensor]);
        source.device.is_host() && target.device.is_host()
    })
}

/// Refuses an environment that names a kernel which this machine does not have.
fn check_kernel() -> Result<()> {
    kvferry_copy::forced_kernel().map(drop).map_err(Error::Value)
}

/// Host copies through the device's kernels, for tests on machines without a GPU.
#[cfg(feature = "emulated")]
mod emulated {
    use std::env;

    use kvferry_core::{Error, Result};
    use kvferry_cuda::emulated::{Order, Scratch};

    /// Names the order in which an emulated device runs its threads; unset: there is none.
    const VARIABLE: &str = "KVFERRY_EMULATED_DEVICE";
    /// As much as blocks of usual devices share.
    pub const SCRATCH: Scratch = Scratch { shared_bytes: 48 << 10, device_bytes: 64 << 20 };

    pub fn order() -> Result<Option<Order>> {
        match env::var(VARIABLE).as_deref() {
            Err(_) => Ok(None),
            Ok("forward") => Ok(Some(Order::new(3, false, false))),
            Ok("backward") => Ok(Some(Order::new(3, false, true))),
            Ok("forward-small") => Ok(Some(Order::new(5, true, false))),
            Ok("backward-small") => Ok(Some(Order::new(5, true, true))),
            Ok(other) => Err(Error::Value(format!(
                "{VARIABLE}={other:?} is not one of forward, backward, forward-small, backward-small"
            ))),
        }
    }
}
