//! Chunks: memory for tables in two halves, pinned and the device's, filled round and round.

use std::collections::VecDeque;
use std::ffi::c_void;
use std::ops::Range;
use std::{ptr, slice};

use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUresult};
use kvferry_core::Result;

use crate::driver::check;
use crate::driver::stream::Stream;

/// At whose multiples tables begin: that of an allocation.
pub const ALIGNMENT: u64 = 256;

/// Memory that is never given back.
#[derive(Debug)]
pub struct Chunk {
    host: *mut u8,
    device: u64,
    pub capacity: u64,
    /// Bytes that were ever taken. Where something lies is its position in this count, modulo the capacity.
    pub end: u64,
    /// In the order in which they were made.
    pub tables: VecDeque<Table>,
}

/// What kernels read for one call, or several that are the same.
#[derive(Debug)]
pub struct Table {
    pub position: u64,
    pub num_bytes: u64,
    /// By which it is found; `None` where it is not what it should be.
    pub digest: Option<u64>,
    /// Recorded after the upload, until that is known to have passed.
    pub uploaded: Option<CUevent>,
    /// Streams that were given it, by the driver's number for them, with an event after the last use.
    pub uses: Vec<(u64, CUevent)>,
    /// Whether it stays for good.
    pub is_kept: bool,
}

/// Events that nothing waits for.
#[derive(Debug, Default)]
pub struct Events(Vec<CUevent>);

impl Chunk {
    pub fn new(capacity: u64) -> Result<Self> {
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
    pub fn room(&mut self, num_bytes: u64, events: &mut Events) -> Result<Option<u64>> {
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
    pub fn address(&self, table: &Table) -> u64 {
        self.device + self.place(table).start
    }

    /// Where it lies in pinned memory.
    pub fn host_of(&self, table: &Table) -> *mut u8 {
        self.host.wrapping_add(usize::try_from(self.place(table).start).expect("bytes of memory"))
    }

    pub fn bytes(&self, table: &Table) -> &[u8] {
        let num_bytes = usize::try_from(table.num_bytes).expect("bytes of memory");
        // SAFETY: so many bytes were written to its pinned half, which is not written while it is borrowed.
        unsafe { slice::from_raw_parts(self.host_of(table), num_bytes) }
    }
}

impl Table {
    /// # Safety
    ///
    /// The stream must exist and belong to the device.
    pub unsafe fn record_use(&mut self, stream: Stream, events: &mut Events) -> Result<()> {
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

    pub fn settle_upload(&mut self, events: &mut Events) -> Result<()> {
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
    pub fn take(&mut self) -> Result<CUevent> {
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
