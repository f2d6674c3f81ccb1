//! Blocks of declared layouts: the same content on both sides, wherever its axes lie.

use crate::copies::block_copy::{BlockCopy, Blocks};
use crate::copies::ids;
use crate::copies::parts::{Part, schedule};
use crate::copies::view::View;
use crate::error::{Result, counted, fail};
use crate::moves::strided::Dim;
use crate::side::Side;
use crate::specs::layout::{Axis, Layout};

/// Bound on the layers of all tensors, some hundred times what models have.
const MAX_LAYERS: u64 = 1 << 16;

/// Tensors of one layout whose blocks hold some layers.
#[derive(Clone, Debug)]
pub struct Stack {
    layout: Layout,
    tensors: Vec<View>,
    /// Tensors that make up a layer: key and value where the layout joins them in none.
    tensors_per_layer: usize,
}

/// One plane of one layer, at block zero.
#[derive(Clone, Copy, Debug)]
struct Place {
    tensor: usize,
    offset: u64,
    /// Items along each head's row.
    row_items: u64,
}

impl Stack {
    /// Takes tensors whose dimensions are the layout's letters, in that order, with any positive strides.
    /// In an attention layout with neither `K` nor `C`, tensors are key and value by turns; an odd one
    /// out means that they are planes of their own.
    pub fn new(layout: Layout, tensors: Vec<View>) -> Result<Self> {
        if tensors.is_empty() {
            fail!(Layout, "there is no tensor of layout \"{layout}\"");
        }
        let dimensions = layout.axes().len();
        for tensor in &tensors {
            if tensor.sizes.len() != dimensions {
                fail!(
                    Layout,
                    "{} has {}, layout \"{layout}\" has {dimensions}",
                    tensor.name,
                    counted(tensor.sizes.len(), "dimension")
                );
            }
        }
        let comes_in_pairs =
            !layout.joins_planes() && layout.has(Axis::Head) && tensors.len().is_multiple_of(2);
        let tensors_per_layer = if comes_in_pairs { 2 } else { 1 };
        let stack = Self { layout, tensors, tensors_per_layer };
        let mut layers = 0_u64;
        for (index, tensor) in stack.tensors.iter().enumerate() {
            let planes = stack.size(index, Axis::Plane);
            if stack.layout.has(Axis::Plane) && planes != 2 {
                fail!(Layout, "{} has {} along K, not 2", tensor.name, counted(planes, "plane"));
            }
            layers = layers.saturating_add(stack.size(index, Axis::Layer));
            if layers > MAX_LAYERS {
                fail!(
                    Layout,
                    "{} and those before it hold {layers} layers, more than {MAX_LAYERS}",
                    tensor.name
                );
            }
        }
        Ok(stack)
    }

    fn position(&self, axis: Axis) -> Option<usize> {
        self.layout.axes().iter().position(|other| *other == axis)
    }

    fn size(&self, tensor: usize, axis: Axis) -> u64 {
        self.position(axis).map_or(1, |position| self.tensors[tensor].sizes[position])
    }

    fn stride(&self, tensor: usize, axis: Axis) -> u64 {
        self.position(axis).map_or(0, |position| self.tensors[tensor].strides[position])
    }

    /// The innermost axis.
    fn row(&self) -> Axis {
        if self.layout.has(Axis::Content) { Axis::Content } else { Axis::Dim }
    }

    /// The tensor that has the fewest blocks, and how many.
    fn fewest_blocks(&self) -> (u64, &str) {
        let blocks = self
            .tensors
            .iter()
            .enumerate()
            .map(|(tensor, view)| (self.size(tensor, Axis::Block), &view.name));
        blocks.min().map_or((0, ""), |(blocks, name)| (blocks, name))
    }

    fn blocks<'a>(&'a self, ids: &'a [u64]) -> Blocks<'a> {
        let dimension = self.position(Axis::Block).unwrap_or(0); // every layout has it
        Blocks { views: &self.tensors, dimension, ids }
    }

    /// Planes of a layer: key and value, one where those are not told apart.
    fn planes(&self) -> usize {
        if self.layout.joins_planes() { 2 } else { self.tensors_per_layer }
    }

    /// The places of every layer's planes; content stays whole where the `other` side's does too, and is
    /// else split where the other side's keys end.
    fn places(&self, other: &Self) -> Result<Vec<Place>> {
        let row = self.row();
        let is_split = row == Axis::Content && other.row() == Axis::Dim;
        let mut key_items = if is_split { other.key_items() } else { Vec::new() }.into_iter();
        let mut places = Vec::new();
        for tensors in (0..self.tensors.len()).step_by(self.tensors_per_layer) {
            for layer in 0..self.size(tensors, Axis::Layer) {
                for tensor in tensors..tensors + self.tensors_per_layer {
                    let offset = layer * self.stride(tensor, Axis::Layer);
                    let row_items = self.size(tensor, row);
                    let whole = Place { tensor, offset, row_items };
                    if is_split {
                        let key_items = key_items.next().unwrap_or(0); // it has fewer layers
                        let Some(value_items) = row_items.checked_sub(key_items) else {
                            fail!(
                                Layout,
                                "{} has {row_items} elements along C, fewer than the {key_items} of a key",
                                self.tensors[tensor].name
                            );
                        };
                        let value = offset + key_items * self.stride(tensor, row);
                        places.push(Place { row_items: key_items, ..whole });
                        places.push(Place { tensor, offset: value, row_items: value_items });
                    } else {
                        places.push(whole);
                        if self.layout.has(Axis::Plane) {
                            places.push(Place { offset: offset + self.stride(tensor, Axis::Plane), ..whole });
                        }
                    }
                }
            }
        }
        Ok(places)
    }

    /// Elements of one head's key, of each layer.
    fn key_items(&self) -> Vec<u64> {
        let keys = (0..self.tensors.len()).step_by(self.tensors_per_layer);
        let layers = |tensor| (0..self.size(tensor, Axis::Layer)).map(move |_| self.size(tensor, Axis::Dim));
        keys.flat_map(layers).collect()
    }
}

/// Binds a copy of whole blocks: block `target_ids[i]` becomes what block `source_ids[i]` is.
pub fn bind(source: &Stack, target: &Stack, source_ids: &[i64], target_ids: &[i64]) -> Result<BlockCopy> {
    if source_ids.len() != target_ids.len() {
        fail!(
            BlockRange,
            "source_block_ids has {}, target_block_ids {}",
            counted(source_ids.len(), "id"),
            target_ids.len()
        );
    }
    target.tensors.iter().try_for_each(View::check_target)?;
    let parts = parts(source, target)?;
    let source_ids = ids::existing("source_block_ids", source_ids, source.fewest_blocks())?;
    let target_ids = ids::existing("target_block_ids", target_ids, target.fewest_blocks())?;
    ids::check_distinct("target_block_ids", &target_ids)?;
    let schedule = schedule(&parts, &source_ids, &target_ids)?;
    BlockCopy::new(schedule, &source.blocks(&source_ids), &target.blocks(&target_ids))
}

fn parts(source: &Stack, target: &Stack) -> Result<Vec<Part>> {
    if source.planes() != target.planes() || source.layout.has(Axis::Head) != target.layout.has(Axis::Head) {
        fail!(
            Layout,
            "layouts \"{}\" and \"{}\" of {} and {} do not hold the same planes and heads",
            source.layout,
            target.layout,
            counted(source.tensors.len(), "tensor"),
            counted(target.tensors.len(), "tensor")
        );
    }
    let (from, to) = (source.places(target)?, target.places(source)?);
    if from.len() != to.len() {
        fail!(Layout, "the source holds {} of layers, the target {}", counted(from.len(), "plane"), to.len());
    }
    from.iter().zip(&to).map(|(from, to)| part(source, target, from, to)).collect()
}

fn part(source: &Stack, target: &Stack, from: &Place, to: &Place) -> Result<Part> {
    let along = |axis: Axis| (source.size(from.tensor, axis), target.size(to.tensor, axis));
    let (source_view, target_view) = (&source.tensors[from.tensor], &target.tensors[to.tensor]);
    let alike = [
        ("bytes an item", (source_view.item_bytes, target_view.item_bytes)),
        ("token slots a block", along(Axis::Slot)),
        ("heads", along(Axis::Head)),
        ("elements a row", (from.row_items, to.row_items)),
    ];
    for (what, (of_source, of_target)) in alike {
        if of_source != of_target {
            let names = (&source_view.name, &target_view.name);
            fail!(Layout, "{} has {of_source} {what}, {} has {of_target}", names.0, names.1);
        }
    }
    let strides = |axis: [Axis; 2]| {
        let [source_axis, target_axis] = axis;
        (source.stride(from.tensor, source_axis), target.stride(to.tensor, target_axis))
    };
    let dim =
        |count: u64, (source_stride, target_stride): (u64, u64)| Dim { count, source_stride, target_stride };
    Ok(Part {
        source_tensor: from.tensor,
        target_tensor: to.tensor,
        source_offset: from.offset,
        target_offset: to.offset,
        block_strides: strides([Axis::Block; 2]),
        dims: vec![
            dim(along(Axis::Slot).0, strides([Axis::Slot; 2])),
            dim(along(Axis::Head).0, strides([Axis::Head; 2])),
            dim(
                from.row_items,
                strides([Side::Source, Side::Target].map(|side| side.of(source, target).row())),
            ),
        ],
        item_bytes: source_view.item_bytes,
    })
}
