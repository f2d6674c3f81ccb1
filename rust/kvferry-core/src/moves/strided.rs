//! Strided runs: a contiguous run of bytes and the dimensions that repeat it, in canonical form.

/// Loop dimensions around a run. Heads, slots, planes and layers need one each.
pub const MAX_DIMS: usize = 4;

/// One loop dimension: how often, and how far it steps on either side, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Dim {
    /// Steps, at least one.
    pub count: u64,
    /// Bytes from one step to the next in the source.
    pub source_stride: u64,
    /// Bytes from one step to the next in the target.
    pub target_stride: u64,
}

impl Dim {
    /// A dimension that does not loop.
    pub const ONE: Self = Self { count: 1, source_stride: 0, target_stride: 0 };

    /// Whether stepping along `self` continues where `inner` ends, on both sides.
    fn continues(self, inner: Self) -> bool {
        self.source_stride == inner.count * inner.source_stride
            && self.target_stride == inner.count * inner.target_stride
    }
}

/// A contiguous run of bytes and the dimensions that repeat it, in canonical form: no dimension
/// of one step but the unused outer ones, outermost first by target stride, nothing mergeable.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Strided {
    /// Bytes that are contiguous on both sides.
    pub run_bytes: u64,
    /// Outermost first; unused ones lead with a count of one.
    pub dims: [Dim; MAX_DIMS],
}

impl Strided {
    /// Brings a run and its dimensions into canonical form; `None` where they do not fit.
    pub fn new(run_bytes: u64, dims: impl IntoIterator<Item = Dim>) -> Option<Self> {
        let mut looping: Vec<Dim> = dims.into_iter().filter(|dim| dim.count > 1).collect();
        looping.sort_by_key(|dim| std::cmp::Reverse((dim.target_stride, dim.source_stride)));
        // The run is the innermost dimension of all: bytes, one apart.
        let mut merged = vec![Dim { count: run_bytes, source_stride: 1, target_stride: 1 }];
        for dim in looping.into_iter().rev() {
            match merged.last_mut() {
                Some(inner) if dim.continues(*inner) => inner.count *= dim.count,
                _ => merged.push(dim),
            }
        }
        let run_bytes = merged[0].count;
        let used = merged.len() - 1;
        let mut canonical = [Dim::ONE; MAX_DIMS];
        let unused = MAX_DIMS.checked_sub(used)?;
        for (slot, dim) in canonical[unused..].iter_mut().zip(merged[1..].iter().rev()) {
            *slot = *dim;
        }
        Some(Self { run_bytes, dims: canonical })
    }

    /// The canonical forms of a run and its dimensions, with the bytes by which each is shifted: one
    /// form, or several where the dimensions do not fit and the least of them is taken step by step.
    pub fn fitting(run_bytes: u64, dims: Vec<Dim>) -> Vec<(u64, u64, Self)> {
        if let Some(strided) = Self::new(run_bytes, dims.iter().copied()) {
            return vec![(0, 0, strided)];
        }
        let (least, mut rest) = (least_loop(&dims), dims);
        let least = rest.swap_remove(least);
        let fitting = Self::fitting(run_bytes, rest);
        let step = |step: u64| {
            let (source, target) = (step * least.source_stride, step * least.target_stride);
            fitting.iter().map(move |(s, t, strided)| (s + source, t + target, *strided))
        };
        (0..least.count).flat_map(step).collect()
    }

    /// The dimensions that loop, outermost first.
    pub fn looping(&self) -> &[Dim] {
        let unused = self.dims.iter().take_while(|dim| dim.count == 1).count();
        &self.dims[unused..]
    }

    /// Runs, once for every index of every dimension.
    pub fn runs(&self) -> u64 {
        self.dims.iter().map(|dim| dim.count).product()
    }

    /// Bytes moved.
    pub fn num_bytes(&self) -> u64 {
        self.runs() * self.run_bytes
    }

    /// Bytes from the first to one past the last that it touches, in source and target.
    pub fn span_bytes(&self) -> (u64, u64) {
        self.dims.iter().fold((self.run_bytes, self.run_bytes), |(source, target), dim| {
            (source + (dim.count - 1) * dim.source_stride, target + (dim.count - 1) * dim.target_stride)
        })
    }
}

/// The dimension that loops the fewest times.
fn least_loop(dims: &[Dim]) -> usize {
    let looping = dims.iter().enumerate().filter(|(_, dim)| dim.count > 1);
    looping.min_by_key(|(_, dim)| dim.count).map_or(0, |(index, _)| index)
}

/// Calls `visit` with the offsets of every index of `dims`, the last one fastest.
pub fn each_step(dims: &[Dim], source: u64, target: u64, visit: &mut impl FnMut(u64, u64)) {
    let Some((dim, inner)) = dims.split_first() else {
        return visit(source, target);
    };
    for step in 0..dim.count {
        each_step(inner, source + step * dim.source_stride, target + step * dim.target_stride, visit);
    }
}
