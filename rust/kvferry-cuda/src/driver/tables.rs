//! Tables: what kernels read besides the tensors, uploaded on the caller's stream and kept for when the same
//! is asked again.
//!
//! A table is written in pinned memory and copied from there. Both halves lie in chunks that are filled
//! round and round: a table stays until the next ones come around to its place. It gives way once every
//! stream that was given it has passed, which events tell; until then the chunk is full, and another one is
//! asked for. Chunks are never given back, since the driver would wait for the whole device. A graph that was
//! captured may run at any time, so that its tables are kept for good.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::ptr;

use cudarc::driver::sys::{self, CUevent};
use kvferry_core::{Error, Result};

use crate::driver::check;
use crate::driver::chunk::{ALIGNMENT, Chunk, Events, Table};
use crate::driver::stream::Stream;

/// Bytes of the first chunk: the tables of some hundred requests of usual size. Later ones double what there
/// is, so that few are ever made.
const FIRST_CHUNK_BYTES: u64 = 8 << 20;
/// Bound on the tables of calls that streams have not come to yet, and of captured ones: more than a
/// driver's queues take of usual requests.
const MAX_BYTES: u64 = 1 << 30;
/// Bound on the tables that graphs keep.
const MAX_CAPTURED_BYTES: u64 = 256 << 20;
/// Bytes at either end of a table by which it is looked for.
const DIGESTED_BYTES: usize = 256;

/// The tables of one device.
#[derive(Debug, Default)]
pub struct Tables {
    chunks: Vec<Chunk>,
    events: Events,
}

/// A table that is on the device when the stream comes to it.
#[derive(Clone, Copy, Debug)]
pub struct Resident {
    chunk: usize,
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
        match (self.find(bytes), is_captured) {
            (Some(known), false) => {
                if let Some(uploaded) = self.uploaded(known)? {
                    // SAFETY: the caller guarantees the stream; the event was recorded.
                    let answer = unsafe { sys::cuStreamWaitEvent(stream.handle(), uploaded, 0) };
                    check(answer, "waiting for an upload")?;
                }
                Ok(known)
            }
            (Some(known), true) => self.keep(known).map(|()| known),
            (None, true) => Err(Error::Value(
                "a captured stream can only repeat a copy whose tables are on the device: make the same call \
                 once before the capture, and wait for it"
                    .to_owned(),
            )),
            // SAFETY: as above.
            (None, false) => unsafe { self.upload(bytes, stream) },
        }
    }

    /// Says that everything that reads the table is enqueued, as far as it could be. Where the driver cannot
    /// tell when that has passed, the table stays for good.
    ///
    /// # Safety
    ///
    /// As for [`Self::resident`].
    pub unsafe fn release(&mut self, resident: Resident, stream: Stream) {
        let table = &mut self.chunks[resident.chunk].tables[resident.index];
        if !table.is_kept {
            // SAFETY: the caller guarantees the stream.
            table.is_kept = unsafe { table.record_use(stream, &mut self.events) }.is_err();
        }
    }

    /// A table of these bytes that is still there.
    fn find(&self, bytes: &[u8]) -> Option<Resident> {
        let (num_bytes, digest) = (bytes.len() as u64, digest(bytes));
        self.chunks.iter().enumerate().find_map(|(chunk, held)| {
            let index = held.tables.iter().rposition(|table| {
                (table.num_bytes, table.digest) == (num_bytes, Some(digest)) && held.bytes(table) == bytes
            })?;
            Some(Resident { chunk, index, address: held.address(&held.tables[index]) })
        })
    }

    /// The event of a table's upload, if that may not have passed yet.
    fn uploaded(&mut self, resident: Resident) -> Result<Option<CUevent>> {
        let table = &mut self.chunks[resident.chunk].tables[resident.index];
        table.settle_upload(&mut self.events)?;
        Ok(table.uploaded)
    }

    fn keep(&mut self, resident: Resident) -> Result<()> {
        if self.uploaded(resident)?.is_some() {
            return Err(Error::Value(
                "the call whose tables a captured stream repeats has not run yet: wait for it".to_owned(),
            ));
        }
        let kept = self.chunks.iter().flat_map(|chunk| &chunk.tables).filter(|table| table.is_kept);
        let kept_bytes: u64 = kept.map(|table| table.num_bytes).sum();
        let table = &mut self.chunks[resident.chunk].tables[resident.index];
        if !table.is_kept && kept_bytes + table.num_bytes > MAX_CAPTURED_BYTES {
            return Err(Error::Memory(format!(
                "captured graphs keep more than {MAX_CAPTURED_BYTES} bytes of tables"
            )));
        }
        table.is_kept = true;
        Ok(())
    }

    /// # Safety
    ///
    /// As for [`Self::resident`].
    unsafe fn upload(&mut self, bytes: &[u8], stream: Stream) -> Result<Resident> {
        let uploaded = self.events.take()?;
        let num_bytes = bytes.len() as u64;
        let (chunk, position) = self.room(num_bytes)?;
        let held = &mut self.chunks[chunk];
        // Until its upload is enqueued it is no table, and stays for good where the driver cannot tell when
        // that has passed.
        let (digest, uses) = (None, Vec::new());
        let table = Table { position, num_bytes, digest, uploaded: Some(uploaded), uses, is_kept: true };
        let (host, address) = (held.host_of(&table), held.address(&table));
        held.end = position + num_bytes;
        held.tables.push_back(table);
        let index = held.tables.len() - 1;
        // SAFETY: no stream uses the place any more, and both halves have room for the table and are never
        // given back; the caller guarantees the stream.
        unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr(), host, bytes.len());
            let answer = sys::cuMemcpyHtoDAsync_v2(address, host.cast(), bytes.len(), stream.handle());
            check(answer, "uploading tables")?;
            check(sys::cuEventRecord(uploaded, stream.handle()), "recording an event")?;
        }
        let table = &mut held.tables[index];
        (table.digest, table.is_kept) = (Some(self::digest(bytes)), false);
        Ok(Resident { chunk, index, address })
    }

    /// A chunk, and a position in it, where so many bytes can be written. Nothing that is in flight is waited
    /// for.
    fn room(&mut self, num_bytes: u64) -> Result<(usize, u64)> {
        for (index, chunk) in self.chunks.iter_mut().enumerate().rev() {
            if let Some(position) = chunk.room(num_bytes, &mut self.events)? {
                return Ok((index, position));
            }
        }
        let total: u64 = self.chunks.iter().map(|chunk| chunk.capacity).sum();
        let capacity = num_bytes.next_multiple_of(ALIGNMENT).max(FIRST_CHUNK_BYTES).max(total);
        let capacity = capacity.min(MAX_BYTES - total);
        if capacity < num_bytes {
            return Err(Error::Memory(format!(
                "the tables of captured graphs, and of copies that have not run yet, fill {total} bytes, and \
                 {num_bytes} more exceed {MAX_BYTES}: wait for a stream"
            )));
        }
        self.chunks.push(Chunk::new(capacity)?);
        Ok((self.chunks.len() - 1, 0))
    }
}

/// What tells most tables apart: their sizes, and what they begin and end with.
fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    let ends = DIGESTED_BYTES.min(bytes.len());
    (bytes.len(), &bytes[..ends], &bytes[bytes.len() - ends..]).hash(&mut hasher);
    hasher.finish()
}
