//! MLCommons Chakra execution traces: one file of nodes for each rank.
//!
//! The schema is `schema/protobuf/et_def.proto` of `mlcommons/chakra` (commit 6dc63e1). How readers
//! interpret it follows `Workload.cc` and `HardwareResource.cc` of ASTRA-sim 2. Chakra: Sridharan
//! et al. 2023, <https://arxiv.org/abs/2305.14516>.
//!
//! A file holds a `GlobalMetadata` and then every `Node`, each preceded by its length. Where the
//! schema leaves a choice:
//!
//! - **Dependencies** are all in `data_deps`. The one on the previous instruction of the stream is
//!   in `ctrl_deps` as well. Some feeders follow only one of the two lists. Both point backwards.
//! - **Order of communication.** ASTRA-sim lets a rank have one collective or send in flight, and
//!   takes any that is ready. Two ranks that start the collectives of two groups in different
//!   orders would deadlock. So a rank's collectives and sends depend on each other in the order of
//!   the Program's list.
//! - **Time** is in whole microseconds. Kernel durations are rounded so that their sum per stream
//!   is right to a microsecond. The attribute `foretold_nanoseconds` has the exact duration,
//!   predicted or measured.
//! - **The size of an all-gather** is the contribution of one member, which ASTRA-sim multiplies.
//!   The size of any other collective is the whole tensor.
//! - **A shift** (each member sends to the next) becomes a send and a receive; the schema has no
//!   type for it.
//! - **Loading samples** is host computation (`is_cpu_op`).
//!
//! It must not know plans or layouts: all output follows from a Program and its timeline.

mod node;
mod rank_nodes;

use crate::error::ExportError;
use crate::wire::Message;
use foretell_program::{Group, Origin, Program, Rank, Timeline};
use node::Value;
use rank_nodes::RankNodes;
use std::collections::BTreeMap;

/// Version of the schema, as other writers state it.
const SCHEMA_VERSION: &str = "0.0.4";

/// The traces of a Program with the times of one step.
#[derive(Debug)]
pub struct Chakra<'a> {
    program: &'a Program,
    timeline: &'a Timeline,
    /// Members of each communicator. The name of a communicator is its index plus one, because 0 is
    /// ASTRA-sim's communicator of all ranks.
    communicators: Vec<Vec<Rank>>,
    /// Index of the communicator, by rank and by group of the rank's list.
    communicator_of: Vec<Vec<usize>>,
    /// Number of the group among all distinct groups, by list and by group of the list.
    group_numbers: Vec<Vec<usize>>,
    distinct_groups: usize,
}

impl<'a> Chakra<'a> {
    /// Prepares the traces: finds the members of every communicator.
    ///
    /// # Errors
    /// [`ExportError::Unmatched`] if the timeline does not belong to the Program.
    pub fn new(program: &'a Program, timeline: &'a Timeline) -> Result<Self, ExportError> {
        let ranks = || (0..program.mesh.world_size()).map(Rank);
        for rank in ranks() {
            let spans = timeline.rank(rank).map_or(0, |rank_timeline| rank_timeline.spans.len());
            let instructions = program.list_of(rank).instructions.len();
            if spans != instructions {
                return Err(ExportError::Unmatched { rank: rank.0, spans, instructions });
            }
        }
        let mut distinct: BTreeMap<&Group, usize> = BTreeMap::new();
        let mut number = |group| {
            let next = distinct.len();
            *distinct.entry(group).or_insert(next)
        };
        let group_numbers: Vec<Vec<usize>> =
            program.lists.iter().map(|list| list.groups.iter().map(&mut number).collect()).collect();
        let mut communicators: Vec<Vec<Rank>> = Vec::new();
        let mut known: BTreeMap<Vec<Rank>, usize> = BTreeMap::new();
        let mut communicator = |members: Vec<Rank>| {
            *known.entry(members).or_insert_with_key(|members| {
                communicators.push(members.clone());
                communicators.len() - 1
            })
        };
        let communicator_of = ranks()
            .map(|rank| {
                let groups = program.list_of(rank).groups.iter();
                groups.map(|group| communicator(group.members(&program.mesh, rank))).collect()
            })
            .collect();
        Ok(Self { program, timeline, communicators, communicator_of, group_numbers, distinct_groups: distinct.len() })
    }

    /// Returns the members of all communicators in the JSON format of ASTRA-sim's
    /// `--comm-group-configuration`: `{"1": [0, 1], ...}`.
    pub fn communicators(&self) -> String {
        let members = |ranks: &Vec<Rank>| {
            let ranks: Vec<String> = ranks.iter().map(|rank| rank.0.to_string()).collect();
            ranks.join(",")
        };
        let entries = self.communicators.iter().enumerate();
        let entries: Vec<String> = entries.map(|(index, ranks)| format!("\"{}\":[{}]", index + 1, members(ranks))).collect();
        format!("{{{}}}", entries.join(","))
    }

    /// Returns the trace of one rank: the contents of `NAME.RANK.et`.
    ///
    /// # Errors
    /// [`ExportError::Malformed`] if an instruction communicates with a peer or group that does not
    /// exist.
    pub fn trace(&self, rank: Rank) -> Result<Vec<u8>, ExportError> {
        let mut file = Vec::new();
        let times = match self.timeline.origin {
            Origin::Predicted => "foretold",
            Origin::Measured => "measured",
        };
        Message::default()
            .text(1, SCHEMA_VERSION)
            .message(2, Value::Text("foretell".into()).named("writer"))
            .message(2, Value::Text(times.into()).named("times"))
            .write_delimited(&mut file);
        for node in RankNodes::of(self, rank)? {
            node.message().write_delimited(&mut file);
        }
        Ok(file)
    }
}
