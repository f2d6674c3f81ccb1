//! The one error type. Its variants are the kinds that a caller can tell apart.

use std::fmt;

use thiserror::Error;

/// What was wrong with a request; the text names what was asked and the limit it broke.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum Error {
    /// A token position does not fall on a block or slot boundary where it must.
    #[error("{0}")]
    Alignment(String),
    /// A block id does not exist, or there are too few for the tokens that are due.
    #[error("{0}")]
    BlockRange(String),
    /// A byte is written twice, or both read and written.
    #[error("{0}")]
    Overlap(String),
    /// A tensor contradicts its declared layout or use, or a layout contradicts itself.
    #[error("{0}")]
    Layout(String),
    /// Two engines can never exchange caches.
    #[error("{0}")]
    Incompatible(String),
    /// TP ranks or sizes, or block sizes, that cannot be paired by a ratio.
    #[error("{0}")]
    Topology(String),
    /// The memory that a result needs is not to be had.
    #[error("{0}")]
    Memory(String),
    /// A transfer failed while it ran.
    #[error("{0}")]
    Transfer(String),
    /// Any other value that makes no sense.
    #[error("{0}")]
    Value(String),
}

/// Results of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// A number of things in a message; `noun` is one of them, and takes an s.
pub fn counted(number: impl fmt::Display, noun: &str) -> String {
    let number = number.to_string();
    let plural = if number == "1" { "" } else { "s" };
    format!("{number} {noun}{plural}")
}

/// Returns early with the given [`Error`] variant and message.
macro_rules! fail {
    ($kind:ident, $($message:tt)+) => {
        return Err($crate::Error::$kind(format!($($message)+)))
    };
}
pub(crate) use fail;
