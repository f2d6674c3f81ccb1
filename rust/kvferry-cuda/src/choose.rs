//! Which way loops go: by a kernel, or by the device's copy engine.
//!
//! Between device buffers, kernels are as fast as the memory, whatever the pieces. Over the bus to the
//! host, the copy engine is faster for large pieces and takes time for each; a kernel moves many small
//! pieces at once, where it can address the host's memory. A page's size does not matter, only what is
//! contiguous on both sides, and how many such pieces a call has in all.

use std::cmp::Reverse;
use std::env;
use std::sync::OnceLock;

use kvferry_core::Error;

/// Pieces of one call that the copy engine takes where a kernel could as well: they take it about a second.
pub const MAX_ENGINE_COPIES: u64 = 1 << 20;

/// Where bytes go, as the device sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Between memory of devices.
    OnDevice,
    /// From the host.
    Upload,
    /// To the host.
    Download,
    /// Between two parts of the host's memory.
    OnHost,
}

/// What executes a loop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// A kernel.
    Kernel,
    /// The copy engine.
    Engine,
}

/// A loop as pieces of one size, in one direction.
#[derive(Clone, Copy, Debug)]
pub struct Traffic {
    /// Where they go.
    pub direction: Direction,
    /// Bytes of each.
    pub num_bytes: u64,
    /// How many.
    pub count: u64,
    /// What can execute it, kernel and engine.
    pub can: [bool; 2],
}

/// Where the copy engine takes over from kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// Pieces of so many bytes are uploaded by the engine.
    pub upload_bytes: u64,
    /// Pieces of so many bytes are downloaded by the engine.
    pub download_bytes: u64,
    /// Where a call has fewer smaller pieces than this in one direction, they are too few to keep a kernel
    /// busy, and go by the engine.
    pub min_kernel_pieces: u64,
}

impl Thresholds {
    /// Uploads: what the field has measured. A piece then takes the engine about as long as 28 KiB are on the
    /// bus, so that a download of 4 KiB ones would have a seventh of its speed, while a kernel's writes are
    /// not waited for. Another bus may want others, which [`crate::calibrate`] finds.
    pub const DEFAULT: Self = Self { upload_bytes: 28 << 10, download_bytes: 4 << 10, min_kernel_pieces: 16 };
    /// A threshold that nothing reaches.
    pub const NEVER: u64 = i64::MAX.cast_unsigned();
    /// The environment variables that override them.
    pub const VARIABLES: [&str; 3] =
        ["KVFERRY_CUDA_UPLOAD_BYTES", "KVFERRY_CUDA_DOWNLOAD_BYTES", "KVFERRY_CUDA_MIN_KERNEL_PIECES"];

    /// Those that hold in this process, read from the environment once.
    pub fn current() -> kvferry_core::Result<Self> {
        static CURRENT: OnceLock<kvferry_core::Result<Thresholds>> = OnceLock::new();
        CURRENT.get_or_init(|| Self::DEFAULT.overridden(|name| env::var(name).ok())).clone()
    }

    /// Those with which one way is chosen wherever it can be.
    pub fn only(way: Way) -> Self {
        match way {
            Way::Kernel => Self { upload_bytes: u64::MAX, download_bytes: u64::MAX, min_kernel_pieces: 0 },
            Way::Engine => Self { upload_bytes: 0, download_bytes: 0, min_kernel_pieces: u64::MAX },
        }
    }

    fn overridden(self, read: impl Fn(&str) -> Option<String>) -> kvferry_core::Result<Self> {
        let value = |name: &str, usual: u64| match read(name) {
            None => Ok(usual),
            Some(text) => text
                .trim()
                .parse()
                .map_err(|_| Error::Value(format!("{name}={text:?} is not a number of 0 or more"))),
        };
        let [upload, download, pieces] = Self::VARIABLES;
        Ok(Self {
            upload_bytes: value(upload, self.upload_bytes)?,
            download_bytes: value(download, self.download_bytes)?,
            min_kernel_pieces: value(pieces, self.min_kernel_pieces)?,
        })
    }

    /// What executes each loop of a call; an error is the first that nothing can.
    pub fn choose(self, loops: &[Traffic]) -> Result<Vec<Way>, usize> {
        let is_small = |pieces: &Traffic| match pieces.direction {
            Direction::Upload => pieces.num_bytes < self.upload_bytes,
            Direction::Download => pieces.num_bytes < self.download_bytes,
            // The engine would have the host wait for a copy from host to host.
            Direction::OnDevice | Direction::OnHost => true,
        };
        let small_pieces = |direction| {
            let small = loops.iter().filter(|pieces| pieces.direction == direction && is_small(pieces));
            small.map(|pieces| pieces.count).fold(0, u64::saturating_add)
        };
        let [uploads, downloads] = [Direction::Upload, Direction::Download].map(small_pieces);
        let is_for_kernel = |pieces: &Traffic| {
            is_small(pieces)
                && match pieces.direction {
                    Direction::Upload => uploads >= self.min_kernel_pieces,
                    Direction::Download => downloads >= self.min_kernel_pieces,
                    Direction::OnDevice | Direction::OnHost => true,
                }
        };
        let way = |(index, pieces): (usize, &Traffic)| match pieces.can {
            [true, true] => Ok(if is_for_kernel(pieces) { Way::Kernel } else { Way::Engine }),
            [true, false] => Ok(Way::Kernel),
            [false, true] => Ok(Way::Engine),
            [false, false] => Err(index),
        };
        let mut ways = loops.iter().enumerate().map(way).collect::<Result<Vec<Way>, usize>>()?;
        relieve_engine(loops, &mut ways);
        Ok(ways)
    }
}

/// Leaves the smallest pieces to a kernel where there are more than [`MAX_ENGINE_COPIES`].
fn relieve_engine(loops: &[Traffic], ways: &mut [Way]) {
    let by_engine = |index: &usize| ways[*index] == Way::Engine;
    let mut by_engine: Vec<usize> = (0..loops.len()).filter(by_engine).collect();
    let mut count = by_engine.iter().fold(0, |sum: u64, index| sum.saturating_add(loops[*index].count));
    by_engine.sort_by_key(|index| Reverse(loops[*index].num_bytes));
    while let Some(smallest) = by_engine.pop().filter(|_| count > MAX_ENGINE_COPIES) {
        if loops[smallest].can[0] {
            ways[smallest] = Way::Kernel;
            count -= loops[smallest].count.min(count);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: [bool; 2] = [true, true];

    fn pieces(direction: Direction, num_bytes: u64, count: u64) -> Traffic {
        Traffic { direction, num_bytes, count, can: BOTH }
    }

    fn ways(loops: &[Traffic]) -> Vec<Way> {
        Thresholds::DEFAULT.choose(loops).unwrap()
    }

    fn way(direction: Direction, num_bytes: u64, count: u64) -> Way {
        ways(&[pieces(direction, num_bytes, count)])[0]
    }

    #[test]
    fn kernels_take_many_small_pieces_and_all_that_stays_on_one_side() {
        assert_eq!(way(Direction::Upload, (28 << 10) - 1, 16), Way::Kernel);
        assert_eq!(way(Direction::Upload, 28 << 10, 16), Way::Engine);
        assert_eq!(way(Direction::Upload, 256, 15), Way::Engine);
        assert_eq!(way(Direction::Download, (4 << 10) - 1, 16), Way::Kernel);
        assert_eq!(way(Direction::Download, 4 << 10, 16), Way::Engine);
        assert_eq!(way(Direction::Download, 256, 15), Way::Engine);
        assert_eq!(way(Direction::OnDevice, 1 << 30, 1), Way::Kernel);
        assert_eq!(way(Direction::OnHost, 1 << 30, 1), Way::Kernel);
    }

    #[test]
    fn small_pieces_of_all_loops_count_together_in_each_direction() {
        let loops = [
            pieces(Direction::Upload, 256, 8),
            pieces(Direction::Download, 256, 15),
            pieces(Direction::Upload, 512, 8),
            pieces(Direction::Upload, 1 << 20, 100),
        ];
        assert_eq!(ways(&loops), [Way::Kernel, Way::Engine, Way::Kernel, Way::Engine]);
    }

    #[test]
    fn the_smallest_pieces_are_left_to_a_kernel_where_the_engine_has_too_many() {
        let loops = [
            pieces(Direction::Download, 64 << 10, MAX_ENGINE_COPIES / 2),
            pieces(Direction::Download, 8 << 10, MAX_ENGINE_COPIES / 2),
            pieces(Direction::Download, 16 << 10, 1),
        ];
        assert_eq!(ways(&loops[..2]), [Way::Engine, Way::Engine]);
        assert_eq!(ways(&loops), [Way::Engine, Way::Kernel, Way::Engine]);
        let only_by_engine = Traffic { can: [false, true], ..loops[1] };
        assert_eq!(ways(&[loops[0], only_by_engine, loops[2]]), [Way::Engine, Way::Engine, Way::Kernel]);
        assert_eq!(ways(&[loops[0], only_by_engine, only_by_engine])[0], Way::Kernel);
        assert_eq!(way(Direction::Upload, 1 << 20, u64::MAX), Way::Kernel);
    }

    #[test]
    fn what_only_one_can_execute_goes_that_way() {
        let small = pieces(Direction::Upload, 1, 100);
        let large = pieces(Direction::Upload, 1 << 20, 100);
        assert_eq!(ways(&[Traffic { can: [false, true], ..small }]), [Way::Engine]);
        assert_eq!(ways(&[Traffic { can: [true, false], ..large }]), [Way::Kernel]);
        assert_eq!(Thresholds::DEFAULT.choose(&[small, Traffic { can: [false, false], ..large }]), Err(1));
    }

    #[test]
    fn the_environment_overrides_thresholds() {
        let read = |name: &str| (name == "KVFERRY_CUDA_DOWNLOAD_BYTES").then(|| "4096".to_owned());
        let overridden = Thresholds::DEFAULT.overridden(read).unwrap();
        assert_eq!(overridden, Thresholds { download_bytes: 4096, ..Thresholds::DEFAULT });
        let error = Thresholds::DEFAULT.overridden(|_| Some("-1".to_owned())).unwrap_err();
        assert!(error.to_string().contains("KVFERRY_CUDA_UPLOAD_BYTES=\"-1\""), "{error}");
    }
}
