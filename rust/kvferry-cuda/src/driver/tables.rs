//! Tables: what kernels read besides the tensors, uploaded on the caller's stream and kept for when the same
//! is asked again.
//!
//! A table is written in pinned memory and copied from there. Both halves lie in chunks that are filled
//! round and round: a table stays until the next ones come around to its place. It gives way once every
//! stream that was given it has passed, which events tell; until then it is passed over, and where too many
//! are, another chunk is asked for. Chunks are never given back, since the driver would wait for the whole device. A graph that was
//! captured may run at any time, so that its tables are kept for good; those that were not on the device before
//! are uploaded whenever it runs.

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};
use std::ptr;

use cudarc::driver::sys::{self, CUevent};
use kvferry_core::{Error, Result};

use crate::driver::check;
use crate::driver::chunk::{Chunk, Events, Table, in_pages};
use crate::driver::stream::Stream;

/// Bytes of the first chunk: the tables of some hundred requests of usual size. Later ones double what there
/// is, so that few are ever made.
const FIRST_CHUNK_BYTES: u64 = 8 << 20;
/// Bound on the tables of calls that streams have not come to yet, and of captured ones: more than a
/// driver's queues take of usual requests.
const MAX_BYTES: u64 = 1 << 30;
/// Bound on those that graphs keep.
const MAX_KEPT_BYTES: u64 = 256 << 20;
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
    position: u64,
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
        let digest = digest(bytes);
        let Some(known) = self.find(bytes, digest) else {
            // SAFETY: the caller guarantees the stream.
            return unsafe { self.upload(bytes, digest, stream, is_captured) };
        };
        match self.uploaded(known)? {
            // A graph cannot wait for it, and takes a table of its own along.
            // SAFETY: as above.
            Some(_) if is_captured => return unsafe { self.upload(bytes, digest, stream, true) },
            Some(uploaded) => {
                // SAFETY: as above; the event was recorded.
                let answer = unsafe { sys::cuStreamWaitEvent(stream.handle(), uploaded, 0) };
                check(answer, "waiting for an upload")?;
            }
            None if is_captured && self.chunks[known.chunk].table_mut(known.position).is_some() => {
                self.check_keeping(bytes.len() as u64)?;
                self.chunks[known.chunk].keep(known.position);
            }
            None => {}
        }
        Ok(known)
    }

    /// Says that everything that reads the table is enqueued, as far as it could be. Where the driver cannot
    /// tell when that has passed, the table stays for good.
    ///
    /// # Safety
    ///
    /// As for [`Self::resident`].
    pub unsafe fn release(&mut self, resident: Resident, stream: Stream) {
        let chunk = &mut self.chunks[resident.chunk];
        let Some(table) = chunk.table_mut(resident.position) else { return };
        // SAFETY: the caller guarantees the stream.
        if unsafe { table.record_use(stream, &mut self.events) }.is_err() {
            chunk.keep(resident.position);
        }
    }

    /// A table of these bytes that is still there.
    fn find(&self, bytes: &[u8], digest: u64) -> Option<Resident> {
        self.chunks.iter().enumerate().find_map(|(chunk, held)| {
            let position = held.find(bytes, digest)?;
            Some(Resident { chunk, position, address: held.addresses(position).0 })
        })
    }

    /// The event of a table's upload, if that may not have passed yet.
    fn uploaded(&mut self, resident: Resident) -> Result<Option<CUevent>> {
        let Some(table) = self.chunks[resident.chunk].table_mut(resident.position) else { return Ok(None) };
        table.settle_upload(&mut self.events)?;
        Ok(table.uploaded)
    }

    /// Refuses that so many bytes more stay for good.
    fn check_keeping(&self, num_bytes: u64) -> Result<()> {
        let kept: u64 = self.chunks.iter().map(Chunk::kept_bytes).sum();
        if kept + in_pages(num_bytes) > MAX_KEPT_BYTES {
            return Err(Error::Memory(format!(
                "captured graphs keep {kept} bytes of tables, and {num_bytes} more exceed {MAX_KEPT_BYTES}"
            )));
        }
        Ok(())
    }

    /// Writes a table down and has it uploaded; in a captured stream, whenever its graph runs.
    ///
    /// # Safety
    ///
    /// As for [`Self::resident`].
    unsafe fn upload(
        &mut self,
        bytes: &[u8],
        digest: u64,
        stream: Stream,
        is_captured: bool,
    ) -> Result<Resident> {
        let num_bytes = bytes.len() as u64;
        if is_captured {
            self.check_keeping(num_bytes)?;
        }
        let (chunk, position) = self.room(num_bytes)?;
        let held = &mut self.chunks[chunk];
        let (address, host) = held.addresses(position);
        let mut table = Table { position, num_bytes, digest: None, uploaded: None, uses: Vec::new() };
        // SAFETY: no stream uses the place any more, and both halves have room for the table and are never
        // given back; the caller guarantees the stream.
        let answer = unsafe {
            ptr::copy_nonoverlapping(bytes.as_ptr(), host, bytes.len());
            sys::cuMemcpyHtoDAsync_v2(address, host.cast(), bytes.len(), stream.handle())
        };
        check(answer, "uploading tables")?;
        // SAFETY: as above.
        let recorded = if is_captured { Ok(None) } else { unsafe { self.events.record(stream) }.map(Some) };
        match recorded {
            Ok(Some(event)) => {
                (table.digest, table.uploaded) = (Some(digest), Some(event));
                held.add(table, &mut self.events)?;
            }
            // A graph's stays, and is found by no other call: it is on the device when the graph comes to it.
            // So does one of which nothing tells when its upload has passed.
            Ok(None) | Err(_) => held.add_kept(table),
        }
        recorded.map(|_| Resident { chunk, position, address })
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
        let least = in_pages(num_bytes);
        if total + least > MAX_BYTES {
            return Err(Error::Memory(format!(
                "tables of captured graphs, and of copies that have not run yet, fill {total} bytes; with \
                 {num_bytes} more they exceed {MAX_BYTES}"
            )));
        }
        let usual = least.max(FIRST_CHUNK_BYTES).max(total).min(MAX_BYTES - total);
        let chunk = match Chunk::new(usual) {
            Err(Error::Memory(_)) if usual > least => Chunk::new(least)?, // little is left
            made => made?,
        };
        self.chunks.push(chunk);
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
