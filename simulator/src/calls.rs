//! What lists exchange in a group or with a peer: collectives and messages, of which few differ.
//!
//! It must not know who meets whom.

use crate::lists::LoweredList;
use foretell_program::{Collective, CollectiveAlgorithm, CollectiveRole, Operation, Program};
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

/// A collective of a group.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Call {
    pub(crate) kind: Collective,
    /// What it is for.
    pub(crate) role: CollectiveRole,
    /// Of the whole tensor.
    pub(crate) bytes: f64,
    /// How it is made.
    pub(crate) algorithm: CollectiveAlgorithm,
}

/// The collectives of each group of each list.
pub(crate) struct Calls(Vec<Vec<Repeated<Call>>>);

impl Calls {
    pub(crate) fn new(program: &Program, lists: &[LoweredList]) -> Self {
        let of_list =
            |list: usize| (0..lists[list].collectives.len()).map(|group| collectives(program, lists, list, group)).collect();
        Self((0..lists.len()).map(of_list).collect())
    }

    pub(crate) fn of(&self, list: usize, group: usize) -> Repeated<Call> {
        self.0[list][group].clone()
    }
}

/// The collectives of a group of a list, in order.
pub(crate) fn collectives(program: &Program, lists: &[LoweredList], list: usize, group: usize) -> Repeated<Call> {
    let instructions = lists[list].collectives[group].iter();
    Repeated::new(instructions.filter_map(|&index| match *program.lists[list].instructions[index as usize].operation {
        Operation::Collective { kind, role, bytes, algorithm, .. } => Some(Call { kind, role, bytes: bytes.value(), algorithm }),
        _ => None,
    }))
}

/// The bytes of messages of a list.
pub(crate) fn message_bytes(program: &Program, list: usize, instructions: &[u32]) -> Repeated<u64> {
    Repeated::new(instructions.iter().filter_map(|&index| match *program.lists[list].instructions[index as usize].operation {
        Operation::Send { bytes, .. } | Operation::Receive { bytes, .. } => Some(bytes.count()),
        _ => None,
    }))
}
