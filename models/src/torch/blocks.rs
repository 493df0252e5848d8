//! The block that each operator belongs to: the modules that repeat, and the operators before and
//! after them.

use super::document::{Document, TracedOperator};
use crate::families::NetworkBlock;
use std::collections::BTreeSet;

/// The blocks of a trace, as its operators are visited.
pub(super) struct Blocks<'a> {
    paths: BTreeSet<&'a str>,
    /// Operators left until the last one in a block is visited.
    left: usize,
    current: Option<&'a str>,
    has_begun: bool,
    has_ended: bool,
    /// The block that begins with the next layer.
    next: Option<NetworkBlock>,
}

impl<'a> Blocks<'a> {
    pub(super) fn new(document: &'a Document) -> Self {
        let paths: BTreeSet<&str> = document.blocks.iter().map(String::as_str).collect();
        let last = document.operators.iter().rposition(|operator| path(&paths, &operator.module).is_some());
        Self { paths, left: last.map_or(0, |last| last + 1), current: None, has_begun: false, has_ended: false, next: None }
    }

    /// Visits an operator. Operators between two blocks belong to the first of them.
    pub(super) fn enter(&mut self, operator: &TracedOperator) {
        let own = path(&self.paths, &operator.module);
        let is_behind = self.left == 0;
        self.left = self.left.saturating_sub(1);
        match own {
            Some(own) if self.current != Some(own) => {
                self.current = Some(own);
                self.has_begun = true;
                self.next = Some(NetworkBlock { name: own.into(), recomputable: true });
            }
            None if self.has_begun && is_behind && !self.has_ended => {
                self.has_ended = true;
                self.next = Some(NetworkBlock { name: "head".into(), recomputable: false });
            }
            _ => {}
        }
    }

    /// The block that begins here.
    pub(super) fn begin(&mut self) -> Option<NetworkBlock> {
        self.next.take()
    }
}

/// The path of the block that a module is in; `None` if it is in none.
fn path<'a>(paths: &BTreeSet<&'a str>, module: &str) -> Option<&'a str> {
    let ends = module.match_indices('.').map(|(end, _)| end).chain([module.len()]);
    ends.filter_map(|end| module.get(..end)).find_map(|path| paths.get(path).copied())
}
