//! Arithmetic of TP ranks, for `kvferry.topology`.

use kvferry_core::{Error, topology};
use pyo3::prelude::*;

use crate::args::{refused, shown};
use crate::errors::{OrRaise, to_py};

/// Raises `TopologyError` where the numbers of the local rank make no sense.
#[pyfunction]
pub fn check_local(
    tp_rank: &Bound<'_, PyAny>,
    tp_size: &Bound<'_, PyAny>,
    block_size: &Bound<'_, PyAny>,
    total_num_kv_heads: &Bound<'_, PyAny>,
) -> PyResult<()> {
    topology::check_local(
        integer("tp_rank", tp_rank)?,
        integer("tp_size", tp_size)?,
        integer("block_size", block_size)?,
        integer("total_num_kv_heads", total_num_kv_heads)?,
    )
    .or_raise()
}

/// Local TP ranks a remote one, or, negative, remote TP ranks a local one.
///
/// Examples
/// --------
/// >>> from kvferry._core import tp_ratio
/// >>> tp_ratio(8, 2), tp_ratio(2, 8)
/// (4, -4)
#[pyfunction]
pub fn tp_ratio(local_tp_size: &Bound<'_, PyAny>, remote_tp_size: &Bound<'_, PyAny>) -> PyResult<i64> {
    let sizes = (integer("tp_size", local_tp_size)?, integer("remote_tp_size", remote_tp_size)?);
    topology::tp_ratio(sizes.0, sizes.1).or_raise()
}

/// Remote TP ranks that stand for the same part of the model as a local one.
///
/// Examples
/// --------
/// >>> from kvferry._core import target_ranks
/// >>> target_ranks(5, 8, 2), target_ranks(1, 2, 8)
/// ([1], [4, 5, 6, 7])
#[pyfunction]
pub fn target_ranks(
    tp_rank: &Bound<'_, PyAny>,
    tp_size: &Bound<'_, PyAny>,
    remote_tp_size: &Bound<'_, PyAny>,
) -> PyResult<Vec<usize>> {
    topology::target_ranks(
        integer("tp_rank", tp_rank)?,
        integer("tp_size", tp_size)?,
        integer("remote_tp_size", remote_tp_size)?,
    )
    .or_raise()
}

/// KV heads that a TP rank holds at least.
///
/// Examples
/// --------
/// >>> from kvferry._core import heads_per_rank
/// >>> heads_per_rank(8, 4), heads_per_rank(8, 16)
/// (2, 1)
#[pyfunction]
pub fn heads_per_rank(num_kv_heads: &Bound<'_, PyAny>, tp_size: &Bound<'_, PyAny>) -> PyResult<u64> {
    let (heads, size) = (integer("total_num_kv_heads", num_kv_heads)?, integer("tp_size", tp_size)?);
    topology::heads_per_rank(heads, size).or_raise()
}

/// Whether several TP ranks hold the same KV head.
///
/// Examples
/// --------
/// >>> from kvferry._core import replicates_heads
/// >>> replicates_heads(8, 8), replicates_heads(8, 16)
/// (False, True)
#[pyfunction]
pub fn replicates_heads(num_kv_heads: &Bound<'_, PyAny>, tp_size: &Bound<'_, PyAny>) -> PyResult<bool> {
    let (heads, size) = (integer("total_num_kv_heads", num_kv_heads)?, integer("tp_size", tp_size)?);
    topology::replicates_heads(heads, size).or_raise()
}

/// Remote blocks that one local block covers.
///
/// Examples
/// --------
/// >>> from kvferry._core import block_size_ratio
/// >>> block_size_ratio(64, 16)
/// 4
#[pyfunction]
pub fn block_size_ratio(
    local_block_size: &Bound<'_, PyAny>,
    remote_block_size: &Bound<'_, PyAny>,
) -> PyResult<i64> {
    let local = integer("block_size", local_block_size)?;
    topology::block_size_ratio(local, integer("remote_block_size", remote_block_size)?).or_raise()
}

/// A number that only the core judges; one that is none of 64 bits makes no topology either.
fn integer(field: &str, value: &Bound<'_, PyAny>) -> PyResult<i64> {
    let wrong =
        || to_py(Error::Topology(format!("{field}={} is not an integer in [-2^63, 2^63)", shown(value))));
    value.extract().map_err(|error| refused(error, value, wrong))
}
