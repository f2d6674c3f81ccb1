//! Memory: registered tensors, and where in them each layer's planes lie.

pub mod cache;
pub mod region;
pub mod tensor;
