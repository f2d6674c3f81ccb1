//! Moves: a plan bound to tensors, as strided loops that are checked, expanded, staged and explained.

pub mod bind;
pub mod columns;
pub mod expand;
pub mod explain;
pub mod overlap;
pub mod schedule;
pub mod staging;
pub mod strided;
