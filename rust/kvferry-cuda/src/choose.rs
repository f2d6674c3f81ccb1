//! Which way a loop goes: by a kernel, or by the device's copy engine.
//!
//! Between device buffers, kernels are as fast as the memory, whatever the pieces. Over the bus to the
//! host, the copy engine is faster for large pieces and takes time for each; a kernel moves many small
//! pieces at once, where it can address the host's memory. A page's size does not matter, only what is
//! contiguous on both sides.

use std::env;
use std::sync::OnceLock;

use kvferry_core::{Error, Result};

/// Bound on the pieces that one call hands to the copy engine: some 24 MiB of addresses.
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

/// Pieces of one size, in one direction.
#[derive(Clone, Copy, Debug)]
pub struct Pieces {
    /// Where they go.
    pub direction: Direction,
    /// Bytes of each.
    pub num_bytes: u64,
    /// How many.
    pub count: u64,
    /// Whether a kernel can address both ends.
    pub is_addressable: bool,
}

/// Where the copy engine takes over from kernels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Thresholds {
    /// Pieces of so many bytes are uploaded by the engine.
    pub upload_bytes: u64,
    /// Pieces of so many bytes are downloaded by the engine.
    pub download_bytes: u64,
    /// Fewer pieces than this are too few to keep a kernel busy, and go by the engine.
    pub min_kernel_pieces: u64,
}

impl Thresholds {
    /// As measured where the field uses them; another bus may want others.
    pub const DEFAULT: Self = Self { upload_bytes: 28 << 10, download_bytes: 0, min_kernel_pieces: 16 };
    /// The environment variables that override them.
    pub const VARIABLES: [&str; 3] =
        ["KVFERRY_CUDA_UPLOAD_BYTES", "KVFERRY_CUDA_DOWNLOAD_BYTES", "KVFERRY_CUDA_MIN_KERNEL_PIECES"];

    /// Those that hold in this process, read from the environment once.
    pub fn current() -> Result<Self> {
        static CURRENT: OnceLock<Result<Thresholds>> = OnceLock::new();
        CURRENT.get_or_init(|| Self::DEFAULT.overridden(|name| env::var(name).ok())).clone()
    }

    fn overridden(self, read: impl Fn(&str) -> Option<String>) -> Result<Self> {
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

    /// What executes such a copy.
    pub fn choose(self, pieces: Pieces) -> Way {
        let Pieces { direction, num_bytes, count, is_addressable } = pieces;
        let is_large = match direction {
            Direction::OnDevice => false,
            Direction::OnHost => true,
            Direction::Upload => num_bytes >= self.upload_bytes || count < self.min_kernel_pieces,
            Direction::Download => num_bytes >= self.download_bytes || count < self.min_kernel_pieces,
        };
        let is_countable = count <= MAX_ENGINE_COPIES;
        if !is_addressable || (is_large && is_countable) { Way::Engine } else { Way::Kernel }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn way(direction: Direction, num_bytes: u64, count: u64) -> Way {
        Thresholds::DEFAULT.choose(Pieces { direction, num_bytes, count, is_addressable: true })
    }

    #[test]
    fn kernels_take_many_small_uploads_and_all_that_stays_on_the_device() {
        assert_eq!(way(Direction::Upload, (28 << 10) - 1, 16), Way::Kernel);
        assert_eq!(way(Direction::Upload, 28 << 10, 16), Way::Engine);
        assert_eq!(way(Direction::Upload, 256, 15), Way::Engine);
        assert_eq!(way(Direction::Download, 256, 1000), Way::Engine);
        assert_eq!(way(Direction::Download, 256, MAX_ENGINE_COPIES + 1), Way::Kernel);
        assert_eq!(way(Direction::OnDevice, 1 << 30, 1), Way::Kernel);
        assert_eq!(way(Direction::OnHost, 1, 1000), Way::Engine);
    }

    #[test]
    fn what_a_kernel_cannot_address_goes_by_the_engine() {
        let pieces = Pieces { direction: Direction::Upload, num_bytes: 1, count: 100, is_addressable: false };
        assert_eq!(Thresholds::DEFAULT.choose(pieces), Way::Engine);
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
