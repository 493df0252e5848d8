//! Sequences of few distinct values.

use std::sync::Arc;

/// A sequence in which few things are said many times. Whoever has the same shares it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Repeated<T> {
    distinct: Arc<[T]>,
    /// Of each the place among those.
    which: Arc<[u32]>,
}

impl<T: Copy + PartialEq> Repeated<T> {
    pub(crate) fn new(things: impl IntoIterator<Item = T>) -> Self {
        let mut distinct: Vec<T> = Vec::new();
        let which = things.into_iter().map(|thing| {
            let known = distinct.iter().position(|one| *one == thing);
            known.unwrap_or_else(|| {
                distinct.push(thing);
                distinct.len() - 1
            }) as u32
        });
        let which = which.collect();
        Self { distinct: distinct.into(), which }
    }

    pub(crate) fn len(&self) -> usize {
        self.which.len()
    }

    /// Its different things, in the order of first use.
    pub(crate) fn distinct(&self) -> &[T] {
        &self.distinct
    }

    /// Which of them the `nth` is.
    pub(crate) fn which(&self, nth: usize) -> u32 {
        self.which[nth]
    }

    pub(crate) fn get(&self, nth: usize) -> T {
        self.distinct[self.which[nth] as usize]
    }
}
