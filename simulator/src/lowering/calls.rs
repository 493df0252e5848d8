//! The collectives and messages of lists. Few of them are distinct.

use super::list::LoweredList;
use super::repeated::Repeated;
use crate::cost::CollectiveCall;
use foretell_program::{Operation, Program};

/// For each list and each of its groups, the group's collectives.
pub(super) struct CallsByList(Vec<Vec<Repeated<CollectiveCall>>>);

impl CallsByList {
    pub(super) fn new(program: &Program, lists: &[LoweredList]) -> Self {
        let of_list =
            |list: usize| (0..lists[list].collectives.len()).map(|group| collectives(program, lists, list, group)).collect();
        Self((0..lists.len()).map(of_list).collect())
    }

    pub(super) fn of(&self, list: usize, group: usize) -> Repeated<CollectiveCall> {
        self.0[list][group].clone()
    }
}

/// The collectives of a group of a list, in order.
pub(crate) fn collectives(program: &Program, lists: &[LoweredList], list: usize, group: usize) -> Repeated<CollectiveCall> {
    let instructions = lists[list].collectives[group].iter();
    Repeated::new(instructions.filter_map(|&index| match *program.lists[list].instructions[index as usize].operation {
        Operation::Collective { kind, role, bytes, algorithm, .. } => {
            Some(CollectiveCall { kind, role, bytes: bytes.value(), algorithm })
        }
        _ => None,
    }))
}

/// The bytes of each message among these instructions of a list.
pub(crate) fn message_bytes(program: &Program, list: usize, instructions: &[u32]) -> Repeated<u64> {
    Repeated::new(instructions.iter().filter_map(|&index| match *program.lists[list].instructions[index as usize].operation {
        Operation::Send { bytes, .. } | Operation::Receive { bytes, .. } => Some(bytes.count()),
        _ => None,
    }))
}
