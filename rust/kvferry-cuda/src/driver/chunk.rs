//! Chunks: memory for tables in two halves, pinned and the device's, filled round and round.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_void;
use std::ops::Range;
use std::{ptr, slice};

use cudarc::driver::sys::{self, CUevent, CUevent_flags, CUresult};
use kvferry_core::Result;

use crate::driver::check;
use crate::driver::stream::Stream;

/// At whose multiples tables begin: a page, which bounds how many there are.
pub const ALIGNMENT: u64 = 4096;
/// Tables that are looked at again for each new one, so that no more events are out than streams need.
const SETTLED_AT_ONCE: usize = 2;

/// Memory that is never given back.
#[derive(Debug)]
pub struct Chunk {
    host: *mut u8,
    device: u64,
    pub capacity: u64,
    /// Bytes that were ever taken. Where something lies is its position in this count, modulo the capacity.
    end: u64,
    /// Those that give way, in the order in which they were made.
    tables: VecDeque<Table>,
    /// So many of the first were found idle.
    settled: usize,
    /// Those that stay for good, by place.
    kept: Vec<Table>,
    /// Positions of those that can be found, by their digests.
    known: HashMap<u64, Vec<u64>>,
}

/// What kernels read for one call, or several that are the same.
#[derive(Debug)]
pub struct Table {
    pub position: u64,
    pub num_bytes: u64,
    /// By which it is found, if it can be.
    pub digest: Option<u64>,
    /// Recorded after the upload, until that is known to have passed.
    pub uploaded: Option<CUevent>,
    /// Streams that were given it, by the driver's number for them, with an event after the last use.
    pub uses: Vec<(u64, CUevent)>,
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
        Ok(Self::of(host.cast(), device, capacity))
    }

    fn of(host: *mut u8, device: u64, capacity: u64) -> Self {
        let (tables, kept, known) = (VecDeque::new(), Vec::new(), HashMap::new());
        Self { host, device, capacity, end: 0, tables, settled: 0, kept, known }
    }

    /// The next position where so many bytes lie side by side, once the tables before it have given way;
    /// `None` where too many of them cannot. Those that stay, or are still needed, are passed over.
    pub fn room(&mut self, num_bytes: u64, events: &mut Events) -> Result<Option<u64>> {
        let turn = self.end + self.capacity;
        'passed_over: while let Some(position) = self.next(num_bytes, turn) {
            // What lies up to one turn behind the end of the new table is overwritten by it.
            while let Some(oldest) = self.tables.front_mut()
                && oldest.position + self.capacity < position + num_bytes
            {
                let is_idle = oldest.is_idle(events)?;
                let Some(mut table) = self.tables.pop_front() else { break };
                self.settled = self.settled.saturating_sub(1);
                self.forget(&table);
                if !is_idle {
                    table.position += self.capacity; // the same place, a turn later
                    self.take_in(table);
                    continue 'passed_over;
                }
            }
            return Ok(Some(position));
        }
        Ok(None)
    }

    /// A position before `turn` where so many bytes cross neither the end nor what is kept.
    fn next(&self, num_bytes: u64, turn: u64) -> Option<u64> {
        let mut position = self.end.next_multiple_of(ALIGNMENT);
        while position + num_bytes <= turn {
            let begin = position % self.capacity;
            let kept = self.kept.get(self.kept.partition_point(|table| self.place(table).end <= begin));
            match kept.map(|table| self.place(table)).filter(|kept| kept.start < begin + num_bytes) {
                _ if begin + num_bytes > self.capacity => position = position.next_multiple_of(self.capacity),
                Some(kept) => position = (position + kept.end - begin).next_multiple_of(ALIGNMENT),
                None => return Some(position),
            }
        }
        None
    }

    /// Adds a table that gives way at the position where there was room for it.
    pub fn add(&mut self, table: Table, events: &mut Events) -> Result<()> {
        self.take_in(table);
        for _ in 0..SETTLED_AT_ONCE {
            let next = self.tables.get_mut(self.settled);
            if !next.map_or(Ok(false), |table| table.is_idle(events))? {
                break;
            }
            self.settled += 1;
        }
        Ok(())
    }

    fn take_in(&mut self, table: Table) {
        self.end = table.position + table.num_bytes;
        if let Some(digest) = table.digest {
            self.known.entry(digest).or_default().push(table.position);
        }
        self.tables.push_back(table);
    }

    /// Has a table be found no more.
    fn forget(&mut self, table: &Table) {
        let Some(digest) = table.digest else { return };
        let same = self.known.entry(digest).or_default();
        same.retain(|other| *other != table.position);
        if same.is_empty() {
            self.known.remove(&digest);
        }
    }

    /// Adds one that stays, at the position where there was room for it.
    pub fn add_kept(&mut self, table: Table) {
        self.end = table.position + table.num_bytes;
        self.insert_kept(table);
    }

    /// Has a table stay. Where it may not be on the device yet, it is found no more, since nothing will tell
    /// when it is.
    pub fn keep(&mut self, position: u64) {
        if let Ok(index) = self.index(position)
            && let Some(mut table) = self.tables.remove(index)
        {
            self.settled -= usize::from(index < self.settled);
            if table.uploaded.is_some() {
                self.forget(&table);
                table.digest = None;
            }
            self.insert_kept(table);
        }
    }

    fn insert_kept(&mut self, table: Table) {
        let begin = self.place(&table).start;
        let index = self.kept.partition_point(|other| self.place(other).start < begin);
        self.kept.insert(index, table);
    }

    /// Bytes that those take which stay.
    pub fn kept_bytes(&self) -> u64 {
        self.kept.iter().map(|table| in_pages(table.num_bytes)).sum()
    }

    /// The position of a table of these bytes.
    pub fn find(&self, bytes: &[u8], digest: u64) -> Option<u64> {
        let is_same = |position: &u64| {
            let table = self.table(*position)?;
            if table.num_bytes != bytes.len() as u64 {
                return None;
            }
            let (_, host) = self.addresses(*position);
            // SAFETY: so many bytes were written to its pinned half, which is not written while it is borrowed.
            let held = unsafe { slice::from_raw_parts(host, bytes.len()) };
            (held == bytes).then_some(*position)
        };
        self.known.get(&digest)?.iter().find_map(is_same)
    }

    fn index(&self, position: u64) -> std::result::Result<usize, usize> {
        self.tables.binary_search_by_key(&position, |table| table.position)
    }

    fn table(&self, position: u64) -> Option<&Table> {
        let Ok(index) = self.index(position) else {
            let begin = position % self.capacity;
            let index = self.kept.binary_search_by_key(&begin, |table| self.place(table).start).ok()?;
            return self.kept.get(index).filter(|table| table.position == position);
        };
        self.tables.get(index)
    }

    /// The table at a position, if it gives way.
    pub fn table_mut(&mut self, position: u64) -> Option<&mut Table> {
        let index = self.index(position).ok()?;
        self.tables.get_mut(index)
    }

    /// Where a table lies in either half.
    fn place(&self, table: &Table) -> Range<u64> {
        let begin = table.position % self.capacity;
        begin..begin + table.num_bytes
    }

    /// Where a position lies on the device, and in pinned memory.
    pub fn addresses(&self, position: u64) -> (u64, *mut u8) {
        let begin = position % self.capacity;
        (self.device + begin, self.host.wrapping_add(usize::try_from(begin).expect("bytes of memory")))
    }
}

/// Bytes that so many take.
pub fn in_pages(num_bytes: u64) -> u64 {
    num_bytes.next_multiple_of(ALIGNMENT)
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
    /// An event behind what is enqueued on the stream.
    ///
    /// # Safety
    ///
    /// The stream must exist and belong to the device, whose context must be current.
    pub unsafe fn record(&mut self, stream: Stream) -> Result<CUevent> {
        let event = self.take()?;
        // SAFETY: the caller guarantees the stream.
        let recorded = check(unsafe { sys::cuEventRecord(event, stream.handle()) }, "recording an event");
        if recorded.is_err() {
            self.0.push(event);
        }
        recorded.map(|()| event)
    }

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
        Chunk::of(ptr::null_mut(), 0, CAPACITY)
    }

    /// Adds a table that no stream uses, if there is room.
    fn add(chunk: &mut Chunk, num_bytes: u64) -> Option<u64> {
        let mut events = Events::default();
        let position = chunk.room(num_bytes, &mut events).unwrap()?;
        let (digest, uploaded, uses) = (Some(num_bytes % 3), None, Vec::new());
        chunk.add(Table { position, num_bytes, digest, uploaded, uses }, &mut events).unwrap();
        Some(position)
    }

    fn places(chunk: &Chunk) -> Vec<Range<u64>> {
        let tables = chunk.tables.iter().chain(&chunk.kept);
        let mut places: Vec<_> = tables.map(|table| chunk.place(table)).collect();
        places.sort_by_key(|place| place.start);
        places
    }

    #[test]
    fn tables_follow_one_another_and_give_way_to_those_that_come_around() {
        let mut chunk = chunk();
        let half = CAPACITY / 2;
        assert_eq!(add(&mut chunk, half - 1), Some(0));
        assert_eq!(add(&mut chunk, half), Some(half));
        assert_eq!(places(&chunk), [0..half - 1, half..CAPACITY]);
        assert_eq!(add(&mut chunk, 1), Some(CAPACITY));
        assert_eq!(add(&mut chunk, half), Some(CAPACITY + ALIGNMENT));
        assert_eq!(places(&chunk), [0..1, ALIGNMENT..ALIGNMENT + half]); // the large ones gave way
        assert_eq!(add(&mut chunk, CAPACITY + 1), None);
    }

    proptest! {
        #[test]
        fn no_two_tables_share_a_place(steps in prop::collection::vec((1..CAPACITY + 9, 0..8_u8), 1..60)) {
            let mut chunk = chunk();
            for (num_bytes, kind) in steps {
                // Most are small, and some are kept.
                let num_bytes = if kind > 1 { num_bytes.div_ceil(8) } else { num_bytes };
                if let Some(position) = add(&mut chunk, num_bytes).filter(|_| kind == 7) {
                    chunk.keep(position);
                }
                let places = places(&chunk);
                for (place, next) in places.iter().zip(places.iter().skip(1)) {
                    prop_assert!(place.end <= next.start, "{:?}", chunk);
                }
                prop_assert!(places.iter().all(|place| place.start % ALIGNMENT == 0 && place.end <= CAPACITY));
                let mut known: Vec<u64> = chunk.known.values().flatten().copied().collect();
                known.sort_unstable();
                let mut positions: Vec<u64> =
                    chunk.tables.iter().chain(&chunk.kept).map(|table| table.position).collect();
                positions.sort_unstable();
                prop_assert_eq!(known, positions);
                prop_assert!(chunk.settled <= chunk.tables.len());
            }
        }
    }
}
