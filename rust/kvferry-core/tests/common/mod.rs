//! Random pairs of engines with a request between them.

use std::sync::Arc;

use kvferry_core::interval::Interval;
use kvferry_core::memory::cache::RankCache;
use kvferry_core::planning::plan::{Plan, RequestBlocks};
use kvferry_core::side::Side;
use kvferry_core::specs::dtype::Dtype;
use kvferry_core::specs::engine::{Engine, EngineFields, PerGroup};
use kvferry_core::specs::model::{Attention, Group, GroupKind};
use proptest::prelude::*;

const LAYOUTS: [&str; 8] = ["KBNHD", "KBHND", "BKNHD", "BHNC", "BNHC", "BNHD", "BLKNHD", "LBHNC"];
const MAX_TOKENS: u64 = 60;

#[derive(Clone, Debug)]
pub struct Half {
    pub tp_size: usize,
    pub tokens_per_block: u64,
    pub layout: &'static str,
    /// Blocks that lie before the first listed one.
    pub skipped_blocks: u64,
    /// Keys by which block ids are shuffled.
    pub order: Vec<u32>,
}

#[derive(Clone, Debug)]
pub struct Case {
    pub heads: u64,
    pub window: Option<u64>,
    pub tokens: Interval,
    pub source: Half,
    pub target: Half,
}

fn half() -> impl Strategy<Value = Half> {
    let layout = prop::sample::select(LAYOUTS.to_vec());
    let order = prop::collection::vec(any::<u32>(), 64);
    (1_usize..9, 1_u64..20, layout, 0_u64..3, order).prop_map(
        |(tp_size, tokens_per_block, layout, skipped_blocks, order)| Half {
            tp_size,
            tokens_per_block,
            layout,
            skipped_blocks,
            order,
        },
    )
}

pub fn case() -> impl Strategy<Value = Case> {
    let tokens = (0..MAX_TOKENS, 0..MAX_TOKENS).prop_map(|(a, b)| Interval::new(a.min(b), a.max(b)));
    let window = prop::option::of(1..MAX_TOKENS);
    (1_u64..6, window, tokens, half(), half()).prop_map(|(heads, window, tokens, source, target)| Case {
        heads,
        window,
        tokens,
        source,
        target,
    })
}

pub fn engine(id: &str, half: &Half, case: &Case) -> Arc<Engine> {
    let kind = GroupKind::Attention(Attention {
        num_kv_heads: case.heads,
        head_dims: [2, 2],
        dtype: Dtype::parse("int8").unwrap(),
        sliding_window: case.window,
        tokens_per_slot: 1,
    });
    let fields = EngineFields {
        engine_id: id.into(),
        groups: vec![Group::new(vec![0, 1], kind).unwrap()],
        tokens_per_block: PerGroup::Same(half.tokens_per_block),
        layout: PerGroup::Same(half.layout.into()),
        tp_size: half.tp_size,
        pp_size: 1,
        cp_size: 1,
        cp_interleave: 1,
        pp_layers: None,
        head_ranges: PerGroup::Same(None),
        null_block_id: PerGroup::Same(None),
        physical_blocks_per_block: PerGroup::Same(1),
        num_blocks: PerGroup::Same(None),
    };
    Arc::new(Engine::new(&fields).unwrap())
}

/// Shuffled ids for every block up to `MAX_TOKENS`; a source begins where it must, a target anywhere.
pub fn blocks(half: &Half, side: Side, case: &Case) -> RequestBlocks {
    let most = case.tokens.begin / half.tokens_per_block;
    let skipped = if side == Side::Source { half.skipped_blocks.min(most) } else { half.skipped_blocks };
    let listed = MAX_TOKENS.div_ceil(half.tokens_per_block).saturating_sub(skipped);
    let mut ids: Vec<i64> = (0..i64::try_from(listed).unwrap()).collect();
    ids.sort_by_key(|id| half.order[usize::try_from(*id).unwrap()]);
    RequestBlocks { ids: vec![ids], first_tokens: vec![skipped * half.tokens_per_block] }
}

/// Tensors without padding, each in memory of its own.
pub fn dense(plan: &Plan, side: Side, rank: usize) -> RankCache {
    let engine = Arc::clone(plan.route().engine(side));
    let cache = RankCache::dense(engine, rank, |group| plan.block_count(side, group)).unwrap();
    let mut addresses = (1_u64..).map(|index| index << 32);
    cache.map(|tensor| tensor.address = addresses.next().unwrap())
}
