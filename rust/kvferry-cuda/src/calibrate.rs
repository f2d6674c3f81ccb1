//! Calibration: both ways over the bus, measured by the size of pieces, and where one overtakes the other.

use std::ffi::c_void;
use std::ptr;
use std::time::{Duration, Instant};

use cudarc::driver::sys::{self, CUstream, CUstream_flags};
use kvferry_core::memory::region::Region;
use kvferry_core::memory::tensor;
use kvferry_core::moves::overlap::BoundSchedule;
use kvferry_core::moves::schedule::{BlockTable, CopyLoop, Schedule};
use kvferry_core::moves::strided::Strided;
use kvferry_core::{Error, Result};

use crate::choose::{Thresholds, Way};
use crate::driver::check;
use crate::driver::device::Device;
use crate::driver::memory::Memory;
use crate::driver::stream::{Stream, Uncaptured};
use crate::records::narrow;
use crate::submit::{Placed, copy_by};

/// Bound on what either side takes.
pub const MAX_BYTES: u64 = 1 << 30;
/// Pieces of one copy at most: what a large request has.
const MAX_PIECES: u64 = 1 << 15;
/// Sizes of pieces, as powers of two: from a head of some tokens to a page of all layers.
const SIZES: std::ops::RangeInclusive<u32> = 8..=22;
/// Numbers of pieces of [`FEW_BYTES`] each, as powers of two.
const COUNTS: std::ops::RangeInclusive<u32> = 0..=8;
const FEW_BYTES: u64 = 4 << 10;
/// By how much two measurements of the same differ.
const NOISE: f64 = 0.05;
/// How long a device is kept busy first, which may have been asleep.
const WARM_UP: Duration = Duration::from_millis(300);
/// Copies that count, after a first one that does not.
const ROUNDS: u64 = 7;
/// An odd number whose multiples jump about.
const JUMP: u64 = 0x9E37_79B1;

/// Bytes per second of pieces of one size, from the call to the end of the copy.
#[derive(Clone, Copy, Debug)]
pub struct Speeds {
    /// Bytes of each piece.
    pub num_bytes: u64,
    /// By a kernel.
    pub kernel: f64,
    /// By the copy engine.
    pub engine: f64,
}

/// What a bus does in one direction.
#[derive(Clone, Debug)]
pub struct BusSpeeds {
    /// Bytes per second of one contiguous copy.
    pub plain: f64,
    /// By the size of pieces, ascending.
    pub fragments: Vec<Speeds>,
}

/// What was measured, and what it asks for.
#[derive(Clone, Debug)]
pub struct Calibration {
    /// From pinned memory of the host.
    pub upload: BusSpeeds,
    /// To it.
    pub download: BusSpeeds,
    /// Where one way overtakes the other.
    pub thresholds: Thresholds,
}

/// Measures the bus between the host and a device that has nothing else to do, with so many bytes of either
/// side: the largest pieces, and at most [`MAX_BYTES`].
pub fn calibrate(ordinal: i32, total_bytes: u64) -> Result<Calibration> {
    let least = 1 << SIZES.end();
    if !(least..=MAX_BYTES).contains(&total_bytes) || !total_bytes.is_power_of_two() {
        return Err(Error::Value(format!("{total_bytes} is no power of two in [{least}, {MAX_BYTES}]")));
    }
    let device = Device::get(ordinal)?;
    let _current = device.make_current()?;
    let _uncaptured = Uncaptured::begin()?;
    let bench = Bench::new(ordinal, total_bytes)?;
    bench.warm_up()?;
    let [upload, download] = [bench.bus(true)?, bench.bus(false)?];
    let counts = [bench.count_for_kernel(true)?, bench.count_for_kernel(false)?];
    let thresholds = Thresholds {
        upload_bytes: size_for_engine(&upload.fragments),
        download_bytes: size_for_engine(&download.fragments),
        min_kernel_pieces: counts[0].max(counts[1]),
    };
    Ok(Calibration { upload, download, thresholds })
}

/// The size from which on the engine is as fast. It wins where both are, as it leaves the multiprocessors alone.
fn size_for_engine(fragments: &[Speeds]) -> u64 {
    let by_size: Vec<_> = fragments.iter().map(|speeds| (speeds.num_bytes, *speeds)).collect();
    from_there_on(&by_size, |speeds| speeds.engine >= speeds.kernel * (1.0 - NOISE))
        .unwrap_or(Thresholds::NEVER)
}

/// The number of pieces from which on a kernel is faster.
fn count_for_kernel(by_count: &[(u64, Speeds)]) -> u64 {
    let most = by_count.last().map_or(1, |(count, _)| *count);
    from_there_on(by_count, |speeds| speeds.kernel >= speeds.engine * (1.0 - NOISE)).unwrap_or(2 * most)
}

/// The first number from which on everything holds.
fn from_there_on(measured: &[(u64, Speeds)], holds: impl Fn(&Speeds) -> bool) -> Option<u64> {
    let holding = measured.iter().rev().take_while(|(_, speeds)| holds(speeds));
    holding.last().map(|(number, _)| *number)
}

/// Memory on either side, and a stream between them, while the device's context is current.
struct Bench {
    ordinal: i32,
    total_bytes: u64,
    host: *mut c_void,
    on_device: u64,
    stream: CUstream,
}

impl Bench {
    fn new(ordinal: i32, total_bytes: u64) -> Result<Self> {
        let (host, on_device, stream) = (ptr::null_mut(), 0, ptr::null_mut());
        let mut bench = Self { ordinal, total_bytes, host, on_device, stream };
        let size = usize::try_from(total_bytes).expect("bytes of memory");
        let flags = CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the library is there and a context current.
        unsafe {
            check(sys::cuMemHostAlloc(&raw mut bench.host, size, 0), "allocating pinned memory")?;
            check(sys::cuMemAlloc_v2(&raw mut bench.on_device, size), "allocating memory")?;
            check(sys::cuStreamCreate(&raw mut bench.stream, flags), "making a stream")?;
        }
        Ok(bench)
    }

    /// Copies until the device's clocks have risen.
    fn warm_up(&self) -> Result<()> {
        let begin = Instant::now();
        while begin.elapsed() < WARM_UP {
            self.speed(true, self.total_bytes, 1, Way::Kernel)?;
        }
        Ok(())
    }

    fn stream(&self) -> Stream {
        Stream(self.stream.expose_provenance() as u64)
    }

    fn bus(&self, is_upload: bool) -> Result<BusSpeeds> {
        let fragments = SIZES.map(|power| {
            let num_bytes = 1 << power;
            self.speeds(is_upload, num_bytes, (self.total_bytes / num_bytes).min(MAX_PIECES))
        });
        let fragments = fragments.collect::<Result<Vec<Speeds>>>()?;
        Ok(BusSpeeds { plain: self.speed(is_upload, self.total_bytes, 1, Way::Engine)?, fragments })
    }

    fn count_for_kernel(&self, is_upload: bool) -> Result<u64> {
        let by_count = COUNTS.map(|power| {
            let count = 1 << power;
            Ok((count, self.speeds(is_upload, FEW_BYTES, count)?))
        });
        Ok(count_for_kernel(&by_count.collect::<Result<Vec<_>>>()?))
    }

    /// Speeds of so many pieces that lie about, a power of two.
    fn speeds(&self, is_upload: bool, num_bytes: u64, count: u64) -> Result<Speeds> {
        let kernel = self.speed(is_upload, num_bytes, count, Way::Kernel)?;
        Ok(Speeds { num_bytes, kernel, engine: self.speed(is_upload, num_bytes, count, Way::Engine)? })
    }

    fn speed(&self, is_upload: bool, num_bytes: u64, count: u64, way: Way) -> Result<f64> {
        let region = |address: u64, kind| Region {
            name: "memory that is measured".to_owned(),
            address,
            extent_bytes: self.total_bytes,
            block_stride: num_bytes,
            device: kind,
            writable: true,
        };
        let on_host = [region(self.host.expose_provenance() as u64, tensor::Device::CPU)];
        let on_device =
            [region(self.on_device, tensor::Device { kind: tensor::Device::CUDA, index: self.ordinal })];
        let (source, target) = if is_upload { (&on_host, &on_device) } else { (&on_device, &on_host) };
        let memory = [Memory::default(), Memory::default()];
        let thresholds = Thresholds::only(way);
        let mut times = Vec::new();
        for round in 0..=ROUNDS {
            let schedule = scattered(num_bytes, count, self.total_bytes / num_bytes, round);
            let bound = BoundSchedule { schedule: &schedule, source, target };
            let placed = [Placed { bound, source: &memory[0], target: &memory[1] }];
            let begin = Instant::now();
            // SAFETY: the stream and both memories are this bench's, and the pieces lie in them.
            let answer = unsafe {
                copy_by(&placed, self.stream(), thresholds)?;
                sys::cuStreamSynchronize(self.stream)
            };
            times.push(begin.elapsed());
            check(answer, "waiting for a copy")?;
        }
        Ok(f64::from(narrow(count * num_bytes)) / median(times.split_off(1)).as_secs_f64())
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        // SAFETY: what was made is given back once, behind what may still be enqueued where a call has failed.
        unsafe {
            if !self.stream.is_null() {
                let _ = sys::cuStreamSynchronize(self.stream);
                let _ = sys::cuStreamDestroy_v2(self.stream);
            }
            if self.on_device != 0 {
                let _ = sys::cuMemFree_v2(self.on_device);
            }
            if !self.host.is_null() {
                let _ = sys::cuMemFreeHost(self.host);
            }
        }
    }
}

/// Pieces from anywhere to anywhere among so many places, both powers of two; others in each round, as each
/// request has tables of its own.
fn scattered(num_bytes: u64, count: u64, places: u64, round: u64) -> Schedule {
    let first = round * count % places;
    let place = |index: u64, jump: u64| (first + (index * jump + round) % count) * num_bytes;
    let source: Vec<u64> = (0..count).map(|index| place(index, JUMP)).collect();
    let target = (0..count).map(|index| place(index, JUMP + 2 * round + 2)).collect();
    let copy = CopyLoop {
        source_tensor: 0,
        target_tensor: 0,
        source_offset: 0,
        target_offset: 0,
        strided: Strided::new(num_bytes, []).expect("one run"),
        entries: 0..source.len(),
    };
    Schedule { loops: vec![copy], table: BlockTable { source, target } }
}

fn median(mut times: Vec<Duration>) -> Duration {
    times.sort_unstable();
    times[times.len() / 2]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_way_takes_over_where_it_stays_ahead() {
        let speeds = |ratios: &[f64]| -> Vec<Speeds> {
            let speeds = |(power, ratio): (usize, &f64)| Speeds {
                num_bytes: 256 << power,
                kernel: 1.0,
                engine: *ratio,
            };
            ratios.iter().enumerate().map(speeds).collect()
        };
        assert_eq!(size_for_engine(&speeds(&[0.1, 1.2, 0.9, 1.0, 2.0])), 2048);
        assert_eq!(size_for_engine(&speeds(&[1.1, 1.2, 0.96, 0.97])), 256);
        assert_eq!(size_for_engine(&speeds(&[1.1, 0.2])), Thresholds::NEVER);
        let by_count = |ratios: &[f64]| -> Vec<(u64, Speeds)> {
            speeds(ratios).into_iter().map(|speeds| (speeds.num_bytes >> 8, speeds)).collect()
        };
        assert_eq!(count_for_kernel(&by_count(&[3.0, 2.0, 1.04, 0.5])), 4);
        assert_eq!(count_for_kernel(&by_count(&[3.0, 2.0, 1.4, 1.3])), 16);
    }

    #[test]
    fn pieces_lie_about_and_each_is_copied_once() {
        for (count, round) in [(1, 0), (1, 3), (256, 0), (256, 5), (1 << 15, 7)] {
            let BlockTable { source, target } = scattered(512, count, 1 << 15, round).table;
            let first = round * count % (1 << 15);
            for places in [&source, &target] {
                let distinct: BTreeSet<u64> = places.iter().copied().collect();
                assert_eq!(distinct, (first..first + count).map(|index| index * 512).collect());
            }
            let joined = source
                .windows(2)
                .zip(target.windows(2))
                .filter(|(source, target)| source[0] + 512 == source[1] && target[0] + 512 == target[1]);
            assert!(joined.count() <= 1);
        }
        let tables = |count| (0..=ROUNDS).map(move |round| scattered(512, count, 1 << 15, round).table);
        for count in [1, 2, 8, 1 << 15] {
            let distinct: BTreeSet<_> = tables(count).map(|table| (table.source, table.target)).collect();
            assert_eq!(distinct.len() as u64, ROUNDS + 1, "{count} pieces");
        }
    }
}
