//! Engines, block ids and plans of the sizes that are measured.

use std::sync::Arc;

use kvferry_core::interval::Interval;
use kvferry_core::planning::plan::{Plan, RequestBlocks};
use kvferry_core::planning::route::Route;
use kvferry_core::side::Side;
use kvferry_core::specs::dtype::Dtype;
use kvferry_core::specs::engine::{Engine, EngineFields, PerGroup};
use kvferry_core::specs::model::{Attention, Group, GroupKind};

/// What is varied of an engine: the rest is Llama 3.1's, 8 KV heads of 128 bfloat16 elements.
#[derive(Clone, Copy)]
pub struct Shape {
    /// Layers of full attention in one group.
    pub layers: u64,
    /// Tensor-parallel size.
    pub tp_size: usize,
    /// Tokens that one block covers.
    pub tokens_per_block: u64,
    /// Axis letters.
    pub layout: &'static str,
}

impl Shape {
    /// The engine of this shape.
    pub fn engine(self, id: &str) -> Arc<Engine> {
        let attention = Attention {
            num_kv_heads: 8,
            head_dims: [128, 128],
            dtype: Dtype::parse("bfloat16").expect("a known dtype"),
            sliding_window: None,
            tokens_per_slot: 1,
        };
        let group = Group::new((0..self.layers).collect(), GroupKind::Attention(attention));
        let fields = EngineFields {
            engine_id: id.to_owned(),
            groups: vec![group.expect("a valid group")],
            tokens_per_block: PerGroup::Same(self.tokens_per_block),
            layout: PerGroup::Same(self.layout.to_owned()),
            tp_size: self.tp_size,
            pp_size: 1,
            cp_size: 1,
            cp_interleave: 1,
            pp_layers: None,
            head_ranges: PerGroup::Same(None),
            null_block_id: PerGroup::Same(None),
            physical_blocks_per_block: PerGroup::Same(1),
            num_blocks: PerGroup::Same(None),
        };
        Arc::new(Engine::new(&fields).expect("a valid engine"))
    }
}

/// A pair of engines and the block ids of one request, which begins at token 0.
pub struct Request {
    route: Arc<Route>,
    source: RequestBlocks,
    target: RequestBlocks,
    tokens: u64,
}

impl Request {
    /// A request whose blocks lie scattered over the first blocks of both engines.
    pub fn new(source: Shape, target: Shape, tokens: u64) -> Self {
        let route = Route::new(source.engine("source"), target.engine("target"), false);
        let blocks = |shape: Shape, seed| RequestBlocks {
            ids: vec![shuffled(tokens.div_ceil(shape.tokens_per_block), seed)],
            first_tokens: vec![0],
        };
        Self {
            route: Arc::new(route.expect("engines that pair")),
            source: blocks(source, 1),
            target: blocks(target, 2),
            tokens,
        }
    }

    /// What target rank 0 reads.
    pub fn plan(&self) -> Plan {
        let tokens = Interval::new(0, self.tokens);
        Plan::new(Arc::clone(&self.route), (Side::Target, 0), &self.source, &self.target, tokens)
            .expect("a valid request")
    }
}

/// The ids below `count` in an order that no prefetcher guesses, the same in every run.
fn shuffled(count: u64, seed: u64) -> Vec<i64> {
    let mut ids: Vec<u64> = (0..count).collect();
    ids.sort_unstable_by_key(|id| scrambled(id ^ (seed << 48)));
    ids.into_iter().map(u64::cast_signed).collect()
}

/// The finalizer of `SplitMix64`: a bijection, so that no two ids compare equal.
fn scrambled(mut bits: u64) -> u64 {
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}
