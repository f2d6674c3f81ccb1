//! The arithmetic of moving KV caches between engines that agree on nothing.
//!
//! A cache element is `(layer, plane, token, head, dim)`, and an engine is a function from it to
//! `(rank, tensor, byte offset)`. Which elements two ranks share follows from intersections of intervals
//! ([`shard`] for heads, [`blocks`] and [`pieces`] for tokens, index equality for layers); where they lie follows from
//! strides ([`slot`], [`tensor`], [`cache`]). From both come copy loops ([`strided`]), which are executed
//! elsewhere, expanded ([`expand`]) or explained ([`explain`]).
//!
//! ```text
//! model + layout ─▶ engine ─▶ route ─▶ plan ─┐
//!                     └▶ slot ─▶ cache ──────┴▶ bind ─▶ overlap, expand, explain
//! ```
//!
//! Nothing here knows a pointer, a thread or Python.
#![forbid(unsafe_code)]

pub mod bind;
pub mod blocks;
pub mod cache;
pub mod columns;
pub mod dtype;
pub mod engine;
mod error;
pub mod expand;
pub mod explain;
pub mod interval;
pub mod layout;
pub mod model;
pub mod overlap;
pub mod paging;
pub mod pairing;
pub mod pieces;
pub mod plan;
pub mod route;
pub mod schedule;
pub mod shard;
pub mod side;
pub mod slot;
pub mod staging;
pub mod strided;
pub mod tensor;

pub use error::{Error, Result};
