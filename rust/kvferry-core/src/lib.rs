//! The arithmetic of moving KV caches between engines that agree on nothing.
//!
//! A cache element is `(layer, plane, token, head, dim)`, and an engine is a function from it to
//! `(rank, tensor, byte offset)`. Which elements two ranks share follows from intersections of intervals
//! (heads in [`specs::shard`], tokens in [`planning::blocks`] and [`planning::pieces`], layers by index);
//! where they lie follows from strides ([`memory`]). From both come copy loops ([`moves::schedule`]),
//! which are executed elsewhere, expanded into descriptors, staged or explained.
//!
//! ```text
//! specs ──▶ planning ──▶ moves ◀── copies
//!   └────▶ memory ─────────┘
//! ```
//!
//! [`copies`] makes the same loops for tensors that belong to no engine.
//!
//! Nothing here knows a pointer, a thread or Python.
#![forbid(unsafe_code)]

pub mod copies;
mod error;
pub mod groups;
mod ids;
pub mod interval;
pub mod memory;
pub mod moves;
pub mod planning;
pub mod side;
pub mod specs;
pub mod topology;

pub use error::{Error, Result, counted};
