//! The device copier: executes bound schedules on memory of GPUs, and between it and pinned host memory.

pub mod choose;
#[cfg(feature = "emulated")]
pub mod emulated;
mod job;
mod matrices;
mod reach;
mod records;
