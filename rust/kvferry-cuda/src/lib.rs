//! The device copier: executes bound schedules on memory of GPUs, and between it and pinned host memory.
//!
//! A schedule's loops become records that kernels read, with vectors and tiles chosen here, or pieces for the
//! copy engine, whichever [is faster](choose); a repair becomes matrices that fit where a block of threads
//! can turn them. The driver is opened when it is first asked for: a machine without one, or a build
//! without kernels, does everything else, and [`available`] says what is missing.
//!
//! This crate holds the `unsafe` code that hands memory to devices. Everything that it relies on about sizes
//! is checked here again, for all loops, before anything is enqueued.

pub mod calibrate;
pub mod choose;
mod driver;
#[cfg(feature = "emulated")]
pub mod emulated;
mod job;
mod matrices;
mod ranges;
mod reach;
mod records;
mod submission;
mod submit;

pub use crate::driver::available;
pub use crate::driver::memory::Memory;
pub use crate::driver::stream::Stream;
pub use crate::submit::{Placed, copy, repair};
