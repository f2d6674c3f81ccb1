//! Tables: what kernels read besides the tensors, uploaded on the caller's stream and kept for when the same
//! is asked again.
//!
//! A table is written in pinned memory and copied from there. Both halves lie in chunks that are filled
//! round and round: a table stays until the next ones come around to its place. It gives way once every
//! stream that was given it has passed, which events tell; until then the chunk is full, and another one is
//! asked for. Chunks are never given back, since the driver would wait for the whole device. A graph that was
//! captured may run at any time, so that its tables are kept for good.

use std::collections::VecDeque;
use std::collections::hash_map::DefaultHasher;
use std::ffi::c_void;
use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::{ptr, slice};

use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUresult};
use kvferry_core::{Error, Result};

use crate::driver::check;
use crate::driver::stream::Stream;

/// Bytes of the first chunk: the tables of some hundred requests of usual size. Later ones double what there
/// is, so that few are ever made.
const FIRST_CHUNK_BYTES: u64 = 8 << 20;
/// Bound on the tables of calls that streams have not come to yet, and of captured ones: more than a
/// driver's queues take of usual requests.
const MAX_BYTES: u64 = 1 << 30;
/// Bound on the tables that graphs keep.
const MAX_CAPTURED_BYTES: u64 = 256 << 20;
/// At whose multiples tables begin: that of an allocation.
const ALIGNMENT: u64 = 256;
/// Bytes at either end of a table by which it is looked for.
const DIGESTED_BYTES: usize = 256;

/// The tables of one device.
#[derive(Debug, Default)]
pub struct Tables {
    chunks: Vec<Chunk>,
    events: Events,
}

/// Memory in two halves, filled round and round.
#[derive(Debug)]
struct Chunk {
    host: *mut u8,
    device: u64,
    capacity: u64,
    /// Bytes that were ever taken. Where something lies is its position in this count, modulo the capacity.
    end: u64,
    /// In the order in which they were made.
    tables: VecDeque<Table>,
}

#[derive(Debug)]
struct Table {
    position: u64,
    num_bytes: u64,
    /// By which it is found; `None` where it is not what it should be.
    digest: Option<u64>,
    /// Recorded after the upload, until that is known to have passed.
    uploaded: Option<CUevent>,
    /// Streams that were given it, by the driver's number for them, with an event after the last use.
    uses: Vec<(u64, CUevent)>,
    /// Whether it stays for good.
    is_kept: bool,
}

/// A table that is on the device when the stream comes to it.
#[derive(Clone, Copy, Debug)]
pub struct Resident {
    chunk: usize,
    index: usize,
    /// Where it lies on the device.
    pub address: u64,
}

/// Events that nothing waits for.
#[derive(Debug, Default)]
struct Events(Vec<CUevent>);

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

impl Chunk {
    fn new(capacity: u64) -> Result<Self> {
        let size = usize::try_from(capacity).expect("bytes of memory");
        let (mut host, mut device): (*mut c_void, u64) = (ptr::null_mut(), 0);
        // SAFETY: the library is there and a context current.
        unsafe {
            check(sys::cuMemHostAlloc(&raw mut host, size, 0), "allocating pinned memory for tables")?;
            let allocated = check(sys::cuMemAlloc_v2(&raw mut device, size), "allocating tables");
            if allocated.is_err() {
                sys::cuMemFreeHost(host);
            }
            allocated?;
        }
        Ok(Self { host: host.cast(), device, capacity, end: 0, tables: VecDeque::new() })
    }

    /// The next position where so many bytes lie side by side on nothing that is kept, once the tables
    /// before it have given way; `None` where some of them cannot.
    fn room(&mut self, num_bytes: u64, events: &mut Events) -> Result<Option<u64>> {
        let Some(position) = self.next(num_bytes) else { return Ok(None) };
        // What lies up to one turn behind the end of the new table is overwritten by it.
        let is_passed = |table: &Table| table.position + self.capacity < position + num_bytes;
        while let Some(index) = self.tables.iter().position(|table| !table.is_kept) {
            let table = &mut self.tables[index];
            if !is_passed(table) {
                break;
            }
            if !table.is_idle(events)? {
                return Ok(None);
            }
            self.tables.remove(index);
        }
        Ok(Some(position))
    }

    fn next(&self, num_bytes: u64) -> Option<u64> {
        let mut position = self.end.next_multiple_of(ALIGNMENT);
        while position + num_bytes <= self.end + self.capacity {
            let begin = position % self.capacity;
            if begin + num_bytes > self.capacity {
                position = position.next_multiple_of(self.capacity);
                continue;
            }
            let kept = self.tables.iter().filter(|table| table.is_kept).map(|table| self.place(table));
            let in_the_way = kept.filter(|kept| kept.start < begin + num_bytes && begin < kept.end);
            match in_the_way.map(|kept| kept.end).max() {
                Some(end) => position = (position + end - begin).next_multiple_of(ALIGNMENT),
                None => return Some(position),
            }
        }
        None
    }

    fn place(&self, table: &Table) -> Range<u64> {
        let begin = table.position % self.capacity;
        begin..begin + table.num_bytes
    }

    /// Where a table lies on the device.
    fn address(&self, table: &Table) -> u64 {
        self.device + self.place(table).start
    }

    /// Where it lies in pinned memory.
    fn host_of(&self, table: &Table) -> *mut u8 {
        self.host.wrapping_add(usize::try_from(self.place(table).start).expect("bytes of memory"))
    }

    fn bytes(&self, table: &Table) -> &[u8] {
        let num_bytes = usize::try_from(table.num_bytes).expect("bytes of memory");
        // SAFETY: so many bytes were written to its pinned half, which is not written while it is borrowed.
        unsafe { slice::from_raw_parts(self.host_of(table), num_bytes) }
    }
}

impl Table {
    /// # Safety
    ///
    /// As for [`Tables::resident`].
    unsafe fn record_use(&mut self, stream: Stream, events: &mut Events) -> Result<()> {
        // SAFETY: the caller guarantees the stream.
        let id = unsafe { stream.id()? };
        let event = if let Some((_, event)) = self.uses.iter().find(|(user, _)| *user == id) {
            *event // what it was recorded after comes before this
        } else {
            self.settle_uses(events)?;
            let event = events.take()?;
            self.uses.push((id, event));
            event
        };
        // SAFETY: as above.
        check(unsafe { sys::cuEventRecord(event, stream.handle()) }, "recording an event")
    }

    /// Whether every stream that was given it has passed.
    fn is_idle(&mut self, events: &mut Events) -> Result<bool> {
        self.settle_upload(events)?;
        self.settle_uses(events)?;
        Ok(self.uploaded.is_none() && self.uses.is_empty())
    }

    fn settle_upload(&mut self, events: &mut Events) -> Result<()> {
        if let Some(event) = self.uploaded
            && is_past(event)?
        {
            self.uploaded = None;
            events.0.push(event);
        }
        Ok(())
    }

    fn settle_uses(&mut self, events: &mut Events) -> Result<()> {
        for index in (0..self.uses.len()).rev() {
            if is_past(self.uses[index].1)? {
                events.0.push(self.uses.swap_remove(index).1);
            }
        }
        Ok(())
    }
}

impl Events {
    fn take(&mut self) -> Result<CUevent> {
        if let Some(event) = self.0.pop() {
            return Ok(event);
        }
        let mut event = ptr::null_mut();
        let flags = CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: the library is there and a context current.
        check(unsafe { sys::cuEventCreate(&raw mut event, flags) }, "making an event")?;
        Ok(event)
    }
}

/// What tells most tables apart: their sizes, and what they begin and end with.
fn digest(bytes: &[u8]) -> u64 {
    let mut hasher = DefaultHasher::new();
    let ends = DIGESTED_BYTES.min(bytes.len());
    (bytes.len(), &bytes[..ends], &bytes[bytes.len() - ends..]).hash(&mut hasher);
    hasher.finish()
}

/// Whether a stream has passed an event.
fn is_past(event: CUevent) -> Result<bool> {
    // SAFETY: the library is there; the event is one of ours, and was recorded.
    match unsafe { sys::cuEventQuery(event) } {
        CUresult::CUDA_ERROR_NOT_READY => Ok(false),
        answer => check(answer, "asking for an event").map(|()| true),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CAPACITY: u64 = 16 * ALIGNMENT;

    fn chunk() -> Chunk {
        Chunk { host: ptr::null_mut(), device: 0, capacity: CAPACITY, end: 0, tables: VecDeque::new() }
    }

    /// Adds a table that no stream uses, if there is room.
    fn add(chunk: &mut Chunk, num_bytes: u64) -> Option<Range<u64>> {
        let position = chunk.room(num_bytes, &mut Events::default()).unwrap()?;
        let (digest, uploaded, uses) = (None, None, Vec::new());
        let table = Table { position, num_bytes, digest, uploaded, uses, is_kept: false };
        let place = chunk.place(&table);
        chunk.end = position + num_bytes;
        chunk.tables.push_back(table);
        Some(place)
    }

    #[test]
    fn tables_follow_one_another_and_give_way_to_those_that_come_around() {
        let mut chunk = chunk();
        let half = CAPACITY / 2;
        assert_eq!(add(&mut chunk, half - 1), Some(0..half - 1));
        assert_eq!(add(&mut chunk, half), Some(half..CAPACITY));
        assert_eq!(chunk.tables.len(), 2);
        assert_eq!(add(&mut chunk, 1), Some(0..1));
        assert_eq!(add(&mut chunk, half), Some(ALIGNMENT..ALIGNMENT + half));
        assert_eq!(chunk.tables.len(), 2); // the large ones gave way
        assert_eq!(add(&mut chunk, CAPACITY + 1), None);
    }

    proptest! {
        #[test]
        fn no_two_tables_share_a_place(steps in prop::collection::vec((1..CAPACITY + 9, 0..8_u8), 1..60)) {
            let mut chunk = chunk();
            for (num_bytes, kind) in steps {
                // Most are small, and some are kept.
                let num_bytes = if kind > 1 { num_bytes.div_ceil(8) } else { num_bytes };
                if add(&mut chunk, num_bytes).is_some() && kind == 7 {
                    chunk.tables.back_mut().unwrap().is_kept = true;
                }
                let mut places: Vec<_> = chunk.tables.iter().map(|table| chunk.place(table)).collect();
                places.sort_by_key(|place| place.start);
                for (place, next) in places.iter().zip(places.iter().skip(1)) {
                    prop_assert!(place.end <= next.start, "{:?}", chunk.tables);
                }
                prop_assert!(places.iter().all(|place| place.start % ALIGNMENT == 0 && place.end <= CAPACITY));
            }
        }
    }
}
