//! Sequences of few distinct values.

use std::sync::Arc;

/// A sequence with few distinct values. Cloning it is cheap.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Repeated<T> {
    /// The distinct values, in the order of first use.
    distinct: Arc<[T]>,
    /// For each value of the sequence, its index in `distinct`.
    indices: Arc<[u32]>,
}

impl<T: Copy + PartialEq> Repeated<T> {
    pub(crate) fn new(values: impl IntoIterator<Item = T>) -> Self {
        let mut distinct: Vec<T> = Vec::new();
        let indices = values.into_iter().map(|value| {
            let known = distinct.iter().position(|known| *known == value);
            known.unwrap_or_else(|| {
                distinct.push(value);
                distinct.len() - 1
            }) as u32
        });
        let indices = indices.collect();
        Self { distinct: distinct.into(), indices }
    }

    /// The length of the sequence.
    pub(crate) fn len(&self) -> usize {
        self.indices.len()
    }

    /// The distinct values, in the order of first use.
    pub(crate) fn distinct(&self) -> &[T] {
        &self.distinct
    }

    /// The index of the `nth` value among the distinct ones.
    pub(crate) fn index(&self, nth: usize) -> u32 {
        self.indices[nth]
    }

    /// The `nth` value.
    pub(crate) fn get(&self, nth: usize) -> T {
        self.distinct[self.indices[nth] as usize]
    }
}
