//! Repairs: rows that a peer filled in its own order, brought into the order of their tensor, in place.
//!
//! Every repair is a transposition. Read in one fixed order, a row is a sequence of items; the peer wrote
//! them as a matrix `[a][b]`, and they belong where the same matrix lies as `[b][a]`.

use crate::copies::ids;
use crate::copies::view::View;
use crate::error::{Result, counted, fail};
use crate::memory::region::Region;
use crate::moves::strided::{Dim, Strided};

/// Bytes of a matrix up to which it is copied out and back. Blocks of usual sizes then stay in a core's
/// second-level cache, the largest in what it can use of the last level, so that memory sees each byte
/// read once and written once.
pub const SCRATCH_BYTES: u64 = 4 << 20;

/// Bound on the items of a matrix, of which a larger one than [`SCRATCH_BYTES`] marks each with a bit: 8 MiB
/// of marks, for blocks some thousand times as large as any engine's.
const MAX_ITEMS: u64 = 1 << 26;

/// What a peer wrote that the tensor's owner reads otherwise.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// So many smaller head-major blocks, in a head-major one.
    BlockSize(u64),
    /// A head-major block, in a token-major one.
    Layout,
    /// So many smaller head-major blocks, in a token-major one.
    BlockSizeAndLayout(u64),
}

/// A step of `stride` bytes, taken `count` times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// How often.
    pub count: u64,
    /// Bytes.
    pub stride: u64,
}

impl Step {
    fn packed(self, stride: u64) -> Dim {
        Dim { count: self.count, source_stride: self.stride, target_stride: stride }
    }

    fn unpacked(self, stride: u64) -> Dim {
        Dim { count: self.count, source_stride: stride, target_stride: self.stride }
    }
}

/// A matrix of items, transposed in place. Place `(i, j)` lies at `i * outer.stride + j * inner.stride`;
/// before, the places in that order hold the matrix `[inner.count][outer.count]`, row after row;
/// afterwards, place `(i, j)` holds its element `(j, i)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transposition {
    /// Rows of places.
    pub outer: Step,
    /// Places in a row.
    pub inner: Step,
    /// An item's dimensions, around its elements.
    pub item: [Step; 2],
    /// Bytes of an element.
    pub element_bytes: u64,
}

/// Rows of a tensor, each several matrices to transpose.
#[derive(Clone, Debug)]
pub struct Repair {
    /// The tensor's memory.
    pub region: Region,
    /// Byte offsets of the rows.
    pub rows: Vec<u64>,
    /// The matrices of a row, one at every index of these.
    pub matrices: [Step; 2],
    /// What is done to each.
    pub transposition: Transposition,
}

impl Transposition {
    /// Items of the matrix.
    pub fn items(&self) -> u64 {
        self.outer.count * self.inner.count
    }

    /// Bytes of one item.
    pub fn item_bytes(&self) -> u64 {
        self.item[0].count * self.item[1].count * self.element_bytes
    }

    /// Whether nothing moves.
    pub fn is_identity(&self) -> bool {
        self.outer.count <= 1 || self.inner.count <= 1
    }

    /// From the places, in their order, into as many contiguous bytes.
    pub fn gather(&self) -> Strided {
        let bytes = self.item_bytes();
        let (outer, inner) = (bytes * self.inner.count, bytes);
        self.strided([outer, inner], Step::packed)
    }

    /// From those bytes to the places where they belong.
    pub fn scatter(&self) -> Strided {
        let bytes = self.item_bytes();
        let (outer, inner) = (bytes, bytes * self.outer.count);
        self.strided([outer, inner], Step::unpacked)
    }

    /// From one place to another.
    pub fn item(&self) -> Strided {
        let dim =
            |step: &Step| Dim { count: step.count, source_stride: step.stride, target_stride: step.stride };
        fitting(self.element_bytes, self.item.iter().map(dim))
    }

    /// From one place into contiguous bytes, and from those to another place.
    pub fn item_and_back(&self) -> (Strided, Strided) {
        let [around, run] = self.item;
        let packed = [(around, run.count * self.element_bytes), (run, self.element_bytes)];
        let dims = |dim: fn(Step, u64) -> Dim| packed.iter().map(move |(step, packed)| dim(*step, *packed));
        (fitting(self.element_bytes, dims(Step::packed)), fitting(self.element_bytes, dims(Step::unpacked)))
    }

    /// Byte offset of the `place`-th place.
    pub fn offset(&self, place: u64) -> u64 {
        place / self.inner.count * self.outer.stride + place % self.inner.count * self.inner.stride
    }

    /// The place whose item belongs to `place`.
    pub fn origin(&self, place: u64) -> u64 {
        place % self.inner.count * self.outer.count + place / self.inner.count
    }

    fn strided(&self, [outer, inner]: [u64; 2], dim: fn(Step, u64) -> Dim) -> Strided {
        let [around, run] = self.item;
        let packed = [(self.outer, outer), (self.inner, inner)].into_iter();
        let item = [(around, run.count * self.element_bytes), (run, self.element_bytes)];
        fitting(self.element_bytes, packed.chain(item).map(|(step, packed)| dim(step, packed)))
    }
}

/// At most four dimensions, which always fit.
fn fitting(run_bytes: u64, dims: impl IntoIterator<Item = Dim>) -> Strided {
    Strided::new(run_bytes, dims).expect("a matrix of items has four dimensions")
}

impl Repair {
    /// Works out what has to be done to the rows `indices` of `cache`, a tensor of shape
    /// `[rows, tokens, heads, elements]`, or with planes `[rows, planes, tokens, heads, elements]`.
    pub fn new(cache: &View, indices: &[i64], fault: Fault) -> Result<Self> {
        cache.check_target()?;
        let step =
            |dimension: usize| Step { count: cache.sizes[dimension], stride: cache.strides[dimension] };
        let (rows, planes, [tokens, heads, elements]) = match (cache.sizes.len(), fault) {
            (4, _) => (step(0), Step { count: 1, stride: 0 }, [step(1), step(2), step(3)]),
            (5, Fault::Layout) => (step(0), step(1), [step(2), step(3), step(4)]),
            (dimensions, _) => fail!(
                Layout,
                "{} has {}, not those of (blocks, tokens, heads, elements)",
                cache.name,
                counted(dimensions, "dimension")
            ),
        };
        if cache.sizes.len() == 5 && planes.count != 2 {
            fail!(Layout, "{} has {} in a block, not 2", cache.name, counted(planes.count, "plane"));
        }
        let parts = match fault {
            Fault::Layout => 1,
            Fault::BlockSize(ratio) | Fault::BlockSizeAndLayout(ratio) => ratio,
        };
        if parts == 0 {
            fail!(Value, "block_size_ratio=0 is not positive");
        }
        if !tokens.count.is_multiple_of(parts) {
            fail!(
                Alignment,
                "block_size_ratio={parts} does not divide {} a block",
                counted(tokens.count, "token")
            );
        }
        let part_tokens = Step { count: tokens.count / parts, stride: tokens.stride };
        let parts = Step { count: parts, stride: part_tokens.count * tokens.stride };
        let one = Step { count: 1, stride: 0 };
        let (matrices, outer, inner, around) = match fault {
            Fault::BlockSize(_) => ([planes, one], heads, parts, part_tokens),
            Fault::Layout | Fault::BlockSizeAndLayout(_) => ([planes, parts], part_tokens, heads, one),
        };
        if outer.count.saturating_mul(inner.count) > MAX_ITEMS {
            fail!(Layout, "{} has blocks of more than {MAX_ITEMS} tokens × heads", cache.name);
        }
        let head_bytes = elements.count.saturating_mul(cache.item_bytes);
        if outer.count > 1 && inner.count > 1 && head_bytes > SCRATCH_BYTES {
            fail!(Layout, "{} has heads of {head_bytes} bytes, more than {SCRATCH_BYTES}", cache.name);
        }
        let matrix_bytes =
            (outer.count * inner.count).saturating_mul(around.count.saturating_mul(head_bytes));
        // A matrix of long items may be as many of shorter ones.
        let (matrices, around) = match matrices {
            [planes, nothing] if matrix_bytes > SCRATCH_BYTES && nothing.count == 1 => {
                ([planes, around], one)
            }
            _ => (matrices, around),
        };
        let mut indices = ids::existing("indices", indices, (rows.count, &cache.name))?;
        ids::check_distinct("indices", &indices)?;
        if cache.extent_bytes == 0 {
            indices.clear(); // rows of no bytes
        }
        let element_bytes = cache.item_bytes;
        Ok(Self {
            region: cache.region(0),
            rows: indices.into_iter().map(|index| index * rows.stride).collect(),
            matrices,
            transposition: Transposition { outer, inner, item: [around, elements], element_bytes },
        })
    }

    /// Bytes that are moved of a row.
    pub fn row_bytes(&self) -> u64 {
        self.steps().iter().map(|step| step.count).product::<u64>() * self.transposition.element_bytes
    }

    /// Asserts that every row lies in the tensor.
    ///
    /// # Panics
    ///
    /// If one does not. [`Self::new`] rules that out; whoever executes it asks again.
    pub fn assert_inside(&self) {
        let reach = self.steps().iter().try_fold(self.transposition.element_bytes, |bytes, step| {
            (step.count - 1).checked_mul(step.stride)?.checked_add(bytes)
        });
        self.region.assert_reach(0, self.rows.iter().max().copied(), reach.unwrap_or(u64::MAX));
    }

    /// What leads to every element of a row.
    fn steps(&self) -> [Step; 6] {
        let Transposition { outer, inner, item: [around, elements], .. } = self.transposition;
        let [planes, parts] = self.matrices;
        [outer, inner, around, elements, planes, parts]
    }
}
