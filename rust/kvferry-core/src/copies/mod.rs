//! Copies of whole blocks between tensors that belong to no engine: all that is known of them is said in
//! the call.

pub mod block_copy;
mod ids;
pub mod layouts;
mod parts;
pub mod repair;
pub mod rows;
pub mod view;
