//! `kvferry._core`: the Python face of the Rust crates, one file a concept.
#![allow(clippy::doc_markdown, reason = "these docs are Python docstrings, in numpydoc's markup")]

mod args;
mod cache;
mod copies;
mod cuda;
mod descriptors;
mod dlpack;
mod engine;
mod errors;
mod execution;
mod explanation;
mod groups;
mod ids;
mod loops;
mod plan;
mod route;
mod staged;
mod threads;
mod topology;

/// The compiled part of kvferry; import its names from `kvferry`.
#[pyo3::pymodule(gil_used = false)]
mod _core {
    use pyo3::prelude::*;

    /// The package's version.
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python's name for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");
    /// Engine group of a layer that no KV group names.
    #[pymodule_export]
    const EXCLUDED_ENGINE_GROUP: i64 = kvferry_core::groups::EXCLUDED_ENGINE_GROUP;
    /// Environment variables of the thresholds that a calibration finds, in the order in which it does.
    #[pymodule_export]
    const CUDA_THRESHOLDS: [&str; 3] = kvferry_cuda::choose::Thresholds::VARIABLES;
    #[pymodule_export]
    use crate::cache::KVCache;
    #[pymodule_export]
    use crate::copies::{
        copy_blocks, copy_kv_blocks, kv_postprocess_blksize_and_layout_on_receive,
        kv_postprocess_blksize_on_receive, kv_postprocess_layout_on_receive,
    };
    #[pymodule_export]
    use crate::cuda::{calibrate_cuda, cuda_unavailable_reason};
    #[pymodule_export]
    use crate::descriptors::Descriptors;
    #[pymodule_export]
    use crate::engine::{Engine, TensorSlot, canonical_layout, check_group, check_model};
    #[pymodule_export]
    use crate::groups::{
        engine_group_ids_per_view, engine_group_layer_indices, expand_engine_block_ids,
        get_engine_group_indices, num_engine_group_infos, num_engine_groups, slice_block_ids_per_group,
    };
    #[pymodule_export]
    use crate::loops::Loops;
    #[pymodule_export]
    use crate::plan::Plan;
    #[pymodule_export]
    use crate::route::Route;
    #[pymodule_export]
    use crate::staged::{Staged, StagedDescriptors};
    #[pymodule_export]
    use crate::threads::{get_num_threads, kernels, set_num_threads};
    #[pymodule_export]
    use crate::topology::{
        block_size_ratio, check_local, heads_per_rank, replicates_heads, target_ranks, tp_ratio,
    };

    /// Sets what is private, and so in no list of names.
    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.as_any().setattr("_emulated_driver", crate::cuda::EMULATED_DRIVER)
    }
}
