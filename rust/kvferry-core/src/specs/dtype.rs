//! Element types: how many bytes a run of elements takes. Bytes are moved, never interpreted.

use crate::error::{Result, fail};

/// Name, bytes of one tensor item, elements in one item.
const DTYPES: [(&str, u64, u64); 13] = [
    ("bfloat16", 2, 1),
    ("float16", 2, 1),
    ("float32", 4, 1),
    ("float64", 8, 1),
    ("float8_e4m3fn", 1, 1),
    ("float8_e5m2", 1, 1),
    ("float8_e8m0fnu", 1, 1),
    ("int8", 1, 1),
    ("uint8", 1, 1),
    ("int16", 2, 1),
    ("int32", 4, 1),
    ("int64", 8, 1),
    ("float4_e2m1fn_x2", 1, 2),
];

/// An element type, equal only to itself: fp16 and bf16 caches are never mixed up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dtype {
    name: &'static str,
    item_bytes: u64,
    elements_per_item: u64,
}

impl Dtype {
    /// Finds a type by its name.
    pub fn parse(name: &str) -> Result<Self> {
        match DTYPES.iter().find(|(known, ..)| *known == name) {
            Some(&(name, item_bytes, elements_per_item)) => Ok(Self { name, item_bytes, elements_per_item }),
            None => {
                fail!(Value, "dtype {name:?} is not one of {}", DTYPES.map(|(known, ..)| known).join(" "))
            }
        }
    }

    /// The name by which it was found.
    pub fn name(self) -> &'static str {
        self.name
    }

    /// Bytes of one tensor item.
    pub fn item_bytes(self) -> u64 {
        self.item_bytes
    }

    /// Checks that `elements` fill whole items.
    pub fn check_packing(self, field: &str, elements: u64) -> Result<()> {
        let packed = self.elements_per_item;
        if !elements.is_multiple_of(packed) {
            fail!(Value, "{field}={elements} must be a multiple of {packed} for dtype {}", self.name);
        }
        Ok(())
    }

    /// Tensor items that hold `elements`, a number that [`Self::check_packing`] has accepted.
    pub fn items(self, elements: u64) -> u64 {
        debug_assert!(elements.is_multiple_of(self.elements_per_item));
        elements / self.elements_per_item
    }
}
