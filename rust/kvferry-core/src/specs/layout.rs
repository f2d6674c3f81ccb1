//! Layouts: which axes a tensor has, in memory order. Declared by the user, never inferred.

use std::fmt;

use crate::error::{Result, fail};

/// One axis of a cache tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Axis {
    /// `L`: the layers that one tensor spans.
    Layer,
    /// `B`: blocks.
    Block,
    /// `K`: the key plane and the value plane.
    Plane,
    /// `N`: token slots inside a block.
    Slot,
    /// `H`: heads held by the rank.
    Head,
    /// `D`: one head's elements of one plane.
    Dim,
    /// `C`: one head's key elements, then its value elements.
    Content,
    /// `S`: a dimension of a state part's own shape.
    State,
}

/// Letters that a user may write, with their axes.
const LETTERS: [(char, Axis); 7] = [
    ('L', Axis::Layer),
    ('B', Axis::Block),
    ('K', Axis::Plane),
    ('N', Axis::Slot),
    ('H', Axis::Head),
    ('D', Axis::Dim),
    ('C', Axis::Content),
];

impl Axis {
    /// The letter that names the axis.
    pub fn letter(self) -> char {
        LETTERS.iter().find(|(_, axis)| *axis == self).map_or('S', |(letter, _)| *letter)
    }
}

/// The axes of a tensor, outermost first.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Layout(Vec<Axis>);

impl Layout {
    /// Parses axis letters; `NHD` and `HND` are shorthands for `KBNHD` and `KBHND`.
    pub fn parse(text: &str) -> Result<Self> {
        let spelled = spelled(text);
        let mut axes = Vec::with_capacity(spelled.len());
        for letter in spelled.chars() {
            let Some(&(_, named)) = LETTERS.iter().find(|entry| entry.0 == letter) else {
                fail!(Layout, "layout {text:?}: letter {letter:?} is not one of L B K N H D C");
            };
            if axes.contains(&named) {
                fail!(Layout, "layout {text:?}: letter {letter:?} occurs twice");
            }
            axes.push(named);
        }
        for needed in [Axis::Block, Axis::Slot] {
            if !axes.contains(&needed) {
                fail!(
                    Layout,
                    "layout {text:?} lacks {}; it must name B, N and one of D and C",
                    needed.letter()
                );
            }
        }
        match axes.iter().filter(|axis| matches!(axis, Axis::Dim | Axis::Content)).count() {
            0 => fail!(Layout, "layout {text:?} has neither D nor C; it must name B, N and one of D and C"),
            1 => {}
            _ => fail!(Layout, "layout {text:?} has both D and C; C stands in place of K and D"),
        }
        if axes.contains(&Axis::Content) && axes.contains(&Axis::Plane) {
            fail!(Layout, "layout {text:?} has both K and C; C already holds key and value");
        }
        if !matches!(axes.last(), Some(Axis::Dim | Axis::Content)) {
            fail!(Layout, "layout {text:?}: D or C must come last, as the innermost axis");
        }
        Ok(Self(axes))
    }

    /// The layout of a latent group where none is given: blocks, slots, elements.
    pub fn latent() -> Self {
        Self(vec![Axis::Block, Axis::Slot, Axis::Dim])
    }

    /// The layout of every state group: slots, then the part's own `dimensions`.
    pub(crate) fn state(dimensions: usize) -> Self {
        let mut axes = vec![Axis::State; dimensions + 1];
        axes[0] = Axis::Block;
        Self(axes)
    }

    /// The axes, outermost first.
    pub fn axes(&self) -> &[Axis] {
        &self.0
    }

    /// Whether the tensor has the axis.
    pub fn has(&self, axis: Axis) -> bool {
        self.0.contains(&axis)
    }

    /// Whether key and value of a layer share one tensor.
    pub fn joins_planes(&self) -> bool {
        self.has(Axis::Plane) || self.has(Axis::Content)
    }

    /// For each axis in memory order, its position among `handed_over`, the letters of a tensor's
    /// dimensions as its owner counts them. `S` stands for all dimensions of a state part.
    pub fn positions_in(&self, handed_over: &str) -> Result<Vec<usize>> {
        let state_dimensions = self.0.iter().filter(|axis| **axis == Axis::State).count();
        if state_dimensions > 0 {
            if handed_over != "BS" {
                fail!(Layout, "axes {handed_over:?} of a state group must be \"BS\"");
            }
            return Ok((0..self.0.len()).collect());
        }
        let letters: Vec<char> = spelled(handed_over).chars().collect();
        let position = |axis: &Axis| letters.iter().position(|letter| *letter == axis.letter());
        match self.0.iter().map(position).collect::<Option<Vec<_>>>() {
            Some(positions) if letters.len() == positions.len() => Ok(positions),
            _ => fail!(Layout, "axes {handed_over:?} must name each axis of layout \"{self}\" once"),
        }
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut letters: Vec<char> = self.0.iter().map(|axis| axis.letter()).collect();
        letters.dedup(); // a state part's dimensions are one letter together
        f.write_str(&letters.into_iter().collect::<String>())
    }
}

/// The letters that a shorthand stands for.
fn spelled(text: &str) -> &str {
    match text {
        "NHD" => "KBNHD",
        "HND" => "KBHND",
        other => other,
    }
}
