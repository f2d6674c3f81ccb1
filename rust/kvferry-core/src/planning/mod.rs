//! Planning: which elements two engines have in common, and what of them a request needs.

pub mod blocks;
pub mod pairing;
pub mod pieces;
pub mod plan;
pub mod route;
