//! Tables: what kernels read besides the tensors, uploaded on the caller's stream and kept for when the same
//! is asked again.
//!
//! A table is written in pinned memory and copied from there. Both halves are idle once every stream that
//! was given the table has passed, which events tell; only then is it written anew. A graph that was
//! captured may run at any time, so that its tables are kept for good.

use std::ffi::c_void;
use std::{ptr, slice};

use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUresult};
use kvferry_core::{Error, Result};

use crate::driver::check;
use crate::driver::stream::Stream;

/// Bytes of tables that are kept while idle: those of some hundred requests of usual size.
const MAX_IDLE_BYTES: usize = 32 << 20;
/// Bound on the tables that graphs keep.
const MAX_CAPTURED_BYTES: usize = 256 << 20;
/// Bytes of the smallest table; the others are this times a power of two, so that one fits many requests.
const MIN_BYTES: usize = 64 << 10;

/// The tables of one device.
#[derive(Debug, Default)]
pub struct Tables {
    all: Vec<Table>,
    /// Events that nothing waits for.
    events: Vec<CUevent>,
    /// Calls so far.
    clock: u64,
}

#[derive(Debug)]
struct Table {
    host: *mut u8,
    device: u64,
    capacity: usize,
    num_bytes: usize,
    /// Recorded after the upload.
    uploaded: CUevent,
    /// Recorded after each use that may not have passed yet.
    uses: Vec<CUevent>,
    last_used: u64,
    is_captured: bool,
}

/// A table that is on the device when the stream comes to it.
#[derive(Clone, Copy, Debug)]
pub struct Resident {
    index: usize,
    /// Where it lies on the device.
    pub address: u64,
}

impl Tables {
    /// Puts `bytes` on the device, in the order of `stream`, unless they are there. The device's context must
    /// be current, and its [`Resident::address`] is good until [`Self::release`].
    ///
    /// # Safety
    ///
    /// The stream must exist and belong to the device.
    pub unsafe fn resident(&mut self, bytes: &[u8], stream: Stream, is_captured: bool) -> Result<Resident> {
        self.clock += 1;
        let known = self.all.iter().position(|table| table.bytes() == bytes);
        let index = match (known, is_captured) {
            (Some(index), true) => {
                self.keep(index)?;
                index
            }
            (Some(index), false) => {
                let table = &self.all[index];
                if !is_past(table.uploaded)? {
                    // SAFETY: the caller guarantees the stream; the event was recorded.
                    let answer = unsafe { sys::cuStreamWaitEvent(stream.handle(), table.uploaded, 0) };
                    check(answer, "waiting for an upload")?;
                }
                index
            }
            (None, true) => {
                return Err(Error::Value(
                    "a captured stream can only repeat a copy whose tables are on the device: make the same \
                     call once before the capture, and wait for it"
                        .to_owned(),
                ));
            }
            // SAFETY: as above.
            (None, false) => unsafe { self.upload(bytes, stream)? },
        };
        self.all[index].last_used = self.clock;
        Ok(Resident { index, address: self.all[index].device })
    }

    /// Says that everything that reads the table is enqueued.
    ///
    /// # Safety
    ///
    /// As for [`Self::resident`].
    pub unsafe fn release(&mut self, resident: Resident, stream: Stream, is_captured: bool) -> Result<()> {
        if is_captured {
            return Ok(()); // kept for good
        }
        let event = self.event()?;
        // SAFETY: the caller guarantees the stream.
        let answer = unsafe { sys::cuEventRecord(event, stream.handle()) };
        self.all[resident.index].uses.push(event);
        check(answer, "recording an event")
    }

    fn keep(&mut self, index: usize) -> Result<()> {
        if !is_past(self.all[index].uploaded)? {
            return Err(Error::Value(
                "the call whose tables a captured stream repeats has not run yet: wait for it".to_owned(),
            ));
        }
        let captured = self.all.iter().filter(|table| table.is_captured);
        let captured_bytes: usize = captured.map(|table| table.capacity).sum();
        let table = &mut self.all[index];
        if !table.is_captured && captured_bytes + table.capacity > MAX_CAPTURED_BYTES {
            return Err(Error::Memory(format!(
                "captured graphs keep more than {MAX_CAPTURED_BYTES} bytes of tables"
            )));
        }
        table.is_captured = true;
        Ok(())
    }

    /// # Safety
    ///
    /// As for [`Self::resident`].
    unsafe fn upload(&mut self, bytes: &[u8], stream: Stream) -> Result<usize> {
        let index = self.room(bytes.len())?;
        let table = &mut self.all[index];
        table.num_bytes = 0; // nothing, until it is on its way
        // SAFETY: the table is idle, so that nothing reads its pinned half, which has room.
        unsafe { ptr::copy_nonoverlapping(bytes.as_ptr(), table.host, bytes.len()) };
        // SAFETY: both halves have room and live until they are idle again; the caller guarantees the stream.
        unsafe {
            let answer =
                sys::cuMemcpyHtoDAsync_v2(table.device, table.host.cast(), bytes.len(), stream.handle());
            check(answer, "uploading tables")?;
            check(sys::cuEventRecord(table.uploaded, stream.handle()), "recording an event")?;
        }
        table.num_bytes = bytes.len();
        Ok(index)
    }

    /// An idle table that holds so many bytes: the one that was used longest ago, or a new one while few are
    /// kept. Nothing that is in flight is waited for.
    fn room(&mut self, num_bytes: usize) -> Result<usize> {
        let kept: usize = self.all.iter().map(|table| table.capacity).sum();
        let mut oldest: Option<usize> = None;
        for index in 0..self.all.len() {
            let is_older = oldest.is_none_or(|old| self.all[index].last_used < self.all[old].last_used);
            if self.all[index].capacity >= num_bytes && is_older && self.is_idle(index)? {
                oldest = Some(index);
            }
        }
        let capacity = num_bytes.max(MIN_BYTES).next_power_of_two();
        if let Some(index) = oldest.filter(|_| kept + capacity > MAX_IDLE_BYTES) {
            return Ok(index);
        }
        if kept + capacity > MAX_IDLE_BYTES {
            self.drop_idle()?; // all too small
        }
        let uploaded = self.event()?;
        self.all.push(Table::new(capacity, uploaded)?);
        Ok(self.all.len() - 1)
    }

    fn is_idle(&mut self, index: usize) -> Result<bool> {
        let table = &mut self.all[index];
        while let Some(event) = table.uses.last() {
            if !is_past(*event)? {
                return Ok(false);
            }
            self.events.extend(table.uses.pop());
        }
        Ok(!table.is_captured && is_past(table.uploaded)?)
    }

    fn drop_idle(&mut self) -> Result<()> {
        for index in (0..self.all.len()).rev() {
            if self.is_idle(index)? {
                let table = self.all.swap_remove(index);
                self.events.push(table.uploaded);
                table.free()?;
            }
        }
        Ok(())
    }

    fn event(&mut self) -> Result<CUevent> {
        if let Some(event) = self.events.pop() {
            return Ok(event);
        }
        let mut event = ptr::null_mut();
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the library is there and a context current.
        check(unsafe { sys::cuEventCreate(&raw mut event, flags) }, "making an event")?;
        Ok(event)
    }
}

impl Table {
    fn new(capacity: usize, uploaded: CUevent) -> Result<Self> {
        let (mut host, mut device): (*mut c_void, u64) = (ptr::null_mut(), 0);
        // SAFETY: the library is there and a context current.
        unsafe {
            check(sys::cuMemHostAlloc(&raw mut host, capacity, 0), "allocating pinned memory for tables")?;
            let allocated = check(sys::cuMemAlloc_v2(&raw mut device, capacity), "allocating tables");
            if allocated.is_err() {
                sys::cuMemFreeHost(host);
            }
            allocated?;
        }
        let (num_bytes, uses, last_used) = (0, Vec::new(), 0);
        Ok(Self {
            host: host.cast(),
            device,
            capacity,
            num_bytes,
            uploaded,
            uses,
            last_used,
            is_captured: false,
        })
    }

    fn free(self) -> Result<()> {
        // SAFETY: it is idle, and nothing refers to it any more.
        unsafe {
            check(sys::cuMemFree_v2(self.device), "freeing tables")?;
            check(sys::cuMemFreeHost(self.host.cast()), "freeing pinned memory of tables")
        }
    }

    fn bytes(&self) -> &[u8] {
        // SAFETY: so many bytes were written to its pinned half, which is not written while it is borrowed.
        unsafe { slice::from_raw_parts(self.host, self.num_bytes) }
    }
}

/// Whether a stream has passed an event, or none was ever recorded.
fn is_past(event: CUevent) -> Result<bool> {
    // SAFETY: the library is there; the event is one of ours.
    match unsafe { sys::cuEventQuery(event) } {
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        answer => check(answer, "asking for an event").map(|()| true),
    }
}
