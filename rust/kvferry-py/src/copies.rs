//! Copies between tensors that belong to no engine: whole blocks, rows by name, repairs in place.

use kvferry_core::copies::block_copy::BlockCopy;
use kvferry_core::copies::layouts::{self, Stack};
use kvferry_core::copies::repair::{Fault, Repair};
use kvferry_core::copies::rows;
use kvferry_core::copies::view::View;
use kvferry_core::specs::layout::Layout;
use kvferry_core::{Error, Result, counted};
use kvferry_cuda::Memory;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyList, PyMapping, PyTuple};

use crate::args::{block_ids, natural, shown};
use crate::dlpack::{self, ManagedTensor};
use crate::errors::{OrRaise, to_py};
use crate::execution::Execution;

/// Copy whole blocks between tensors of the same content, whatever the layouts.
///
/// Bytes are moved, never interpreted: items must have the same size, and their dtype is not looked at.
///
/// Parameters
/// ----------
/// source, target
///     A tensor that speaks DLPack (torch, numpy, …) in host or CUDA memory, or a list of them: one a
///     layer, or key and value by turns where the layout has heads and neither ``K`` nor ``C``. Dimensions
///     are the layout's letters in that order; strides may be any positive ones. Either side may hold several
///     layers in one tensor (``L``), and key and value in one row (``C``).
/// source_block_ids, target_block_ids
///     Ids of blocks, matched by place: lists, ranges, or integer arrays; those on a device are
///     waited for.
/// source_layout, target_layout
///     Axis letters, see `Layout`.
/// stream
///     A CUDA stream as a number (torch: ``stream.cuda_stream``); ``None``, 0: the default stream. Copies
///     of device memory are enqueued there, not waited for: order other streams and keep tensors alive
///     until it has passed (`kvferry.cuda`). Copies of host memory alone have finished, whatever it is.
/// threads
///     At most so many threads take part; ``None``: as many as the machine runs at once.
///
/// Raises
/// ------
/// LayoutError
///     The two sides do not hold the same layers, planes, token slots, heads or items, or a tensor
///     contradicts its layout, overlaps itself or, as a target, is read-only.
/// BlockRangeError
///     An id that does not exist, or lists of different lengths.
/// OverlapError
///     A target block is named twice, or memory is both read and written.
///
/// Nothing has been written when one of these is raised. A `TransferError` says that the CUDA driver has
/// failed: what was enqueued before may still run (`kvferry.cuda`).
///
/// Examples
/// --------
/// >>> import numpy as np
/// >>> from kvferry.copy import copy_blocks
/// >>> source = np.arange(3 * 2 * 4 * 1).reshape(3, 2, 4, 1)  # [blocks, heads, tokens, head_dim]
/// >>> target = np.zeros((5, 4, 2, 1), int)  # [blocks, tokens, heads, head_dim]
/// >>> copy_blocks(source, target, [2], [0], source_layout="BHND", target_layout="BNHD")
/// >>> target[0, :, :, 0].tolist()
/// [[16, 20], [17, 21], [18, 22], [19, 23]]
#[pyfunction]
#[pyo3(signature = (source, target, source_block_ids, target_block_ids, *, source_layout, target_layout, stream=None, threads=None))]
#[expect(clippy::too_many_arguments, reason = "the signature is Python's, with keywords")]
pub fn copy_blocks(
    py: Python<'_>,
    source: &Bound<'_, PyAny>,
    target: &Bound<'_, PyAny>,
    source_block_ids: &Bound<'_, PyAny>,
    target_block_ids: &Bound<'_, PyAny>,
    source_layout: &str,
    target_layout: &str,
    stream: Option<&Bound<'_, PyAny>>,
    threads: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let execution = Execution::new(stream, threads)?;
    let (source_layout, target_layout) =
        (Layout::parse(source_layout).or_raise()?, Layout::parse(target_layout).or_raise()?);
    let source_ids = block_ids("source_block_ids", source_block_ids)?;
    let target_ids = block_ids("target_block_ids", target_block_ids)?;
    let sources = Views::of_one_or_several("source", source)?;
    let targets = Views::of_one_or_several("target", target)?;
    py.detach(|| {
        let source = Stack::new(source_layout, sources.views)?;
        let target = Stack::new(target_layout, targets.views)?;
        run(&layouts::bind(&source, &target, &source_ids, &target_ids)?, execution)
    })
    .or_raise()
}

/// Copy rows of the first dimension, layer by layer, between two dicts of tensors.
///
/// Parameters
/// ----------
/// src_kv_caches, dst_kv_caches
///     Tensors that speak DLPack, by layer name; every source layer is copied to the target of its name.
///     Two names may stand for the same pair of tensors, which is then copied once.
/// src_block_ids, dst_block_ids
///     Row indices, matched by place. Where either is empty, or their lengths differ, or there are no
///     targets, or one of the four is ``None``, nothing is done.
/// direction
///     ``"h2d"`` or ``"d2h"``; where the tensors are says the same.
/// strict
///     Lists of different lengths are an error, and so are missing targets where there is none at all.
/// stream
///     A CUDA stream as a number (torch: ``stream.cuda_stream``); ``None``, 0: the default stream. Copies
///     of device memory are enqueued there, not waited for: order other streams and keep tensors alive
///     until it has passed (`kvferry.cuda`). Copies of host memory alone have finished, whatever it is.
/// threads
///     At most so many threads take part; ``None``: as many as the machine runs at once.
///
/// Raises
/// ------
/// ValueError
///     Another direction.
/// BlockRangeError
///     A layer that the target does not have, an id that does not exist, or with ``strict`` lists of
///     different lengths.
/// LayoutError
///     Rows of different shape or item size, or a target that is read-only or overlaps itself.
/// OverlapError
///     A target row is named twice, or memory is both read and written.
///
/// Nothing has been written when one of these is raised. A `TransferError` says that the CUDA driver has
/// failed: what was enqueued before may still run (`kvferry.cuda`).
///
/// Examples
/// --------
/// >>> import numpy as np
/// >>> from kvferry.copy import copy_kv_blocks
/// >>> device, host = {"layers.0": np.arange(6).reshape(3, 2)}, {"layers.0": np.zeros((4, 2), int)}
/// >>> copy_kv_blocks(device, host, [2, 0], [1, 3], "d2h")
/// >>> host["layers.0"].tolist()
/// [[0, 0], [4, 5], [0, 0], [0, 1]]
#[pyfunction]
#[pyo3(signature = (src_kv_caches, dst_kv_caches, src_block_ids, dst_block_ids, direction, *, strict=false, stream=None, threads=None))]
#[expect(clippy::too_many_arguments, reason = "the signature is Python's, with keywords")]
pub fn copy_kv_blocks(
    py: Python<'_>,
    src_kv_caches: &Bound<'_, PyAny>,
    dst_kv_caches: &Bound<'_, PyAny>,
    src_block_ids: &Bound<'_, PyAny>,
    dst_block_ids: &Bound<'_, PyAny>,
    direction: &Bound<'_, PyAny>,
    strict: bool,
    stream: Option<&Bound<'_, PyAny>>,
    threads: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let execution = Execution::new(stream, threads)?;
    if !(direction.eq("h2d")? || direction.eq("d2h")?) {
        let given = shown(direction);
        return Err(PyValueError::new_err(format!("direction={given} is neither \"h2d\" nor \"d2h\"")));
    }
    if [src_kv_caches, dst_kv_caches, src_block_ids, dst_block_ids].iter().any(|given| given.is_none()) {
        return Ok(());
    }
    let source_ids = block_ids("src_block_ids", src_block_ids)?;
    let target_ids = block_ids("dst_block_ids", dst_block_ids)?;
    let (source_count, target_count) = (source_ids.len(), target_ids.len());
    if source_count != target_count && strict {
        return Err(to_py(Error::BlockRange(format!(
            "src_block_ids has {}, dst_block_ids {target_count}",
            counted(source_count, "id")
        ))));
    }
    if source_count != target_count || source_ids.is_empty() {
        return Ok(());
    }
    let (sources, targets) = named_pairs(src_kv_caches, dst_kv_caches, strict)?;
    py.detach(|| run(&rows::bind(&sources.views, &targets.views, &source_ids, &target_ids)?, execution))
        .or_raise()
}

/// Repair blocks that a peer filled with several smaller head-major blocks, one after another.
///
/// Parameters
/// ----------
/// cache
///     A tensor of shape ``[blocks, tokens, heads, elements]``, read by head, then by token: the memory
///     order of a head-major cache. Its strides are not looked at, and may be any positive ones.
/// indices
///     The blocks to repair, in place.
/// block_size_ratio
///     How many of the peer's blocks make one of these; it divides the tokens.
/// stream
///     A CUDA stream as a number (torch: ``stream.cuda_stream``); ``None``, 0: the default stream. Copies
///     of device memory are enqueued there, not waited for: order other streams and keep tensors alive
///     until it has passed (`kvferry.cuda`). Copies of host memory alone have finished, whatever it is.
/// threads
///     At most so many threads take part; ``None``: as many as the machine runs at once.
///
/// Raises
/// ------
/// ValueError
///     The ratio is not positive; an `AlignmentError` where it does not divide the tokens.
/// BlockRangeError, OverlapError
///     An index that does not exist, or occurs twice.
/// LayoutError
///     A tensor of another number of dimensions, read-only, or overlapping itself.
///
/// Nothing has been written when one of these is raised. A `TransferError` says that the CUDA driver has
/// failed: what was enqueued before may still run (`kvferry.cuda`).
///
/// Examples
/// --------
/// A block of 2 heads and 4 tokens, filled with 2 blocks of 2 tokens: ``[block][head][token]``.
///
/// >>> import numpy as np
/// >>> from kvferry.copy import kv_postprocess_blksize_on_receive
/// >>> head_major = np.array([0, 1, 10, 11, 2, 3, 12, 13]).reshape(1, 2, 4, 1)
/// >>> cache = head_major.transpose(0, 2, 1, 3)  # [blocks, tokens, heads, elements]
/// >>> kv_postprocess_blksize_on_receive(cache, [0], 2)
/// >>> cache[0, :, :, 0].T.tolist()
/// [[0, 1, 2, 3], [10, 11, 12, 13]]
#[pyfunction]
#[pyo3(signature = (cache, indices, block_size_ratio, *, stream=None, threads=None))]
pub fn kv_postprocess_blksize_on_receive(
    cache: &Bound<'_, PyAny>,
    indices: &Bound<'_, PyAny>,
    block_size_ratio: &Bound<'_, PyAny>,
    stream: Option<&Bound<'_, PyAny>>,
    threads: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let ratio = natural("block_size_ratio", block_size_ratio)?;
    repair(cache, indices, Fault::BlockSize(ratio), stream, threads)
}

/// Repair blocks that a peer filled head-major in a token-major cache.
///
/// Parameters
/// ----------
/// cache
///     A tensor of shape ``[blocks, tokens, heads, elements]``, or with key and value inside the block
///     ``[blocks, 2, tokens, heads, elements]``, read by token, then by head: the memory order of a
///     token-major cache. Its strides are not looked at, and may be any positive ones.
/// indices
///     The blocks to repair, in place.
/// stream
///     A CUDA stream as a number (torch: ``stream.cuda_stream``); ``None``, 0: the default stream. Copies
///     of device memory are enqueued there, not waited for: order other streams and keep tensors alive
///     until it has passed (`kvferry.cuda`). Copies of host memory alone have finished, whatever it is.
/// threads
///     At most so many threads take part; ``None``: as many as the machine runs at once.
///
/// Raises
/// ------
/// BlockRangeError, OverlapError
///     An index that does not exist, or occurs twice.
/// LayoutError
///     A tensor of another number of dimensions, read-only, or overlapping itself.
///
/// Nothing has been written when one of these is raised. A `TransferError` says that the CUDA driver has
/// failed: what was enqueued before may still run (`kvferry.cuda`).
///
/// Examples
/// --------
/// >>> import numpy as np
/// >>> from kvferry.copy import kv_postprocess_layout_on_receive
/// >>> cache = np.array([0, 1, 2, 10, 11, 12]).reshape(1, 3, 2, 1)  # holds [head][token]
/// >>> kv_postprocess_layout_on_receive(cache, [0])
/// >>> cache[0, :, :, 0].tolist()
/// [[0, 10], [1, 11], [2, 12]]
#[pyfunction]
#[pyo3(signature = (cache, indices, *, stream=None, threads=None))]
pub fn kv_postprocess_layout_on_receive(
    cache: &Bound<'_, PyAny>,
    indices: &Bound<'_, PyAny>,
    stream: Option<&Bound<'_, PyAny>>,
    threads: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    repair(cache, indices, Fault::Layout, stream, threads)
}

/// Repair blocks that a peer filled with several smaller head-major blocks in a token-major cache.
///
/// Parameters
/// ----------
/// cache
///     A tensor of shape ``[blocks, tokens, heads, elements]``, read by token, then by head: the memory
///     order of a token-major cache. Its strides are not looked at, and may be any positive ones.
/// indices
///     The blocks to repair, in place.
/// block_size_ratio
///     How many of the peer's blocks make one of these; it divides the tokens.
/// stream
///     A CUDA stream as a number (torch: ``stream.cuda_stream``); ``None``, 0: the default stream. Copies
///     of device memory are enqueued there, not waited for: order other streams and keep tensors alive
///     until it has passed (`kvferry.cuda`). Copies of host memory alone have finished, whatever it is.
/// threads
///     At most so many threads take part; ``None``: as many as the machine runs at once.
///
/// Raises
/// ------
/// ValueError
///     The ratio is not positive; an `AlignmentError` where it does not divide the tokens.
/// BlockRangeError, OverlapError
///     An index that does not exist, or occurs twice.
/// LayoutError
///     A tensor of another number of dimensions, read-only, or overlapping itself.
///
/// Nothing has been written when one of these is raised. A `TransferError` says that the CUDA driver has
/// failed: what was enqueued before may still run (`kvferry.cuda`).
///
/// Examples
/// --------
/// >>> import numpy as np
/// >>> from kvferry.copy import kv_postprocess_blksize_and_layout_on_receive
/// >>> cache = np.array([0, 1, 10, 11, 2, 3, 12, 13]).reshape(1, 4, 2, 1)  # [block][head][token]
/// >>> kv_postprocess_blksize_and_layout_on_receive(cache, [0], 2)
/// >>> cache[0, :, :, 0].tolist()
/// [[0, 10], [1, 11], [2, 12], [3, 13]]
#[pyfunction]
#[pyo3(signature = (cache, indices, block_size_ratio, *, stream=None, threads=None))]
pub fn kv_postprocess_blksize_and_layout_on_receive(
    cache: &Bound<'_, PyAny>,
    indices: &Bound<'_, PyAny>,
    block_size_ratio: &Bound<'_, PyAny>,
    stream: Option<&Bound<'_, PyAny>>,
    threads: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let ratio = natural("block_size_ratio", block_size_ratio)?;
    repair(cache, indices, Fault::BlockSizeAndLayout(ratio), stream, threads)
}

fn repair(
    cache: &Bound<'_, PyAny>,
    indices: &Bound<'_, PyAny>,
    fault: Fault,
    stream: Option<&Bound<'_, PyAny>>,
    threads: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let execution = Execution::new(stream, threads)?;
    let indices = block_ids("indices", indices)?;
    let (_owner, raw) = dlpack::import("cache", cache)?;
    cache
        .py()
        .detach(|| {
            let repair = Repair::new(&View::new("cache", &raw)?, &indices, fault)?;
            // SAFETY: the region is writable (`Repair::new`). `_owner` keeps host memory alive until this
            // returns; that device memory outlives what is enqueued, that the stream exists, and that nobody
            // else uses the tensor meanwhile, is the caller's part.
            unsafe { execution.repair(&repair) }
        })
        .or_raise()
}

/// Imported tensors, and what keeps them alive.
#[derive(Default)]
struct Views {
    views: Vec<View>,
    owners: Vec<ManagedTensor>,
}

impl Views {
    fn of_one_or_several(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut views = Self::default();
        if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
            for (index, tensor) in value.try_iter()?.enumerate() {
                views.add(&format!("{name}[{index}]"), &tensor?)?;
            }
        } else {
            views.add(name, value)?;
        }
        Ok(views)
    }

    fn add(&mut self, name: &str, tensor: &Bound<'_, PyAny>) -> PyResult<()> {
        let (owner, raw) = dlpack::import(name, tensor)?;
        self.views.push(View::new(name, &raw).or_raise()?);
        self.owners.push(owner);
        Ok(())
    }
}

/// The source tensors, and for each the target of its name.
fn named_pairs(
    sources: &Bound<'_, PyAny>,
    targets: &Bound<'_, PyAny>,
    strict: bool,
) -> PyResult<(Views, Views)> {
    let mapping = |name: &str, value: &Bound<'_, PyAny>| match value.cast::<PyMapping>() {
        Ok(mapping) => Ok(mapping.clone().unbind()),
        Err(_) => {
            Err(PyTypeError::new_err(format!("{name} must map layer names to tensors, got {}", shown(value))))
        }
    };
    let py = sources.py();
    let sources = mapping("src_kv_caches", sources)?.into_bound(py);
    let targets = mapping("dst_kv_caches", targets)?.into_bound(py);
    let (mut from, mut to) = (Views::default(), Views::default());
    if targets.is_empty()? && !strict {
        return Ok((from, to));
    }
    for item in sources.items()?.iter() {
        let (name, source): (Bound<'_, PyAny>, Bound<'_, PyAny>) = item.extract()?;
        if !targets.contains(&name)? {
            return Err(to_py(Error::BlockRange(format!(
                "layer {} of src_kv_caches is not in dst_kv_caches",
                shown(&name)
            ))));
        }
        from.add(&format!("src_kv_caches[{}]", shown(&name)), &source)?;
        to.add(&format!("dst_kv_caches[{}]", shown(&name)), &targets.get_item(&name)?)?;
    }
    Ok((from, to))
}

/// Runs a copy whose tensors our callers' `Views` keep alive.
fn run(copy: &BlockCopy, execution: Execution) -> Result<()> {
    // SAFETY: targets are writable, and no byte of one is written twice or read (`BlockCopy`). `Views` keep
    // host memory alive until this returns; that device memory outlives what is enqueued, and that the
    // stream exists, is said to be the caller's part.
    unsafe { execution.copy(&[copy.bound()], &[[&Memory::default(), &Memory::default()]]) }
}
