//! Specs: what a model caches, and how an engine cuts it into ranks, blocks and tensors.

pub mod dtype;
pub mod engine;
pub mod layout;
pub mod model;
pub mod paging;
pub mod shard;
pub mod slot;
