//! Lowers one Program: checks it, reads its lists, connects its ranks and finds durations.

use super::Lowered;
use super::list::LoweredList;
use super::list_times::{ListTimes, balanced_parts, list_times, uneven_groups};
use super::pairing::Pairing;
use super::ranks::{JobOffset, LoweringContext, SimulatedRank};
use crate::cost::CostModel;
use crate::error::SimulationError;
use crate::network::{Collectives, MeshRotation};
use foretell_program::{GroupId, Operation, Program, StageProgram};
use foretell_topologies::Topology;
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// What to do if there are more ranks than devices.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Oversubscription {
    /// Refuse the Program.
    #[default]
    Refused,
    /// Run rank `r` on device `r` modulo the number of devices. Ranks of one device share it.
    Allowed,
}

/// Threads that read the lists of a Program.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Threads {
    All,
    /// Only the caller's thread, for callers that already run one Program per thread: a rayon join
    /// here could pick up another such Program and nest without bound.
    Caller,
}

/// A Program whose lists have been read and checked, before its ranks are connected.
pub(crate) struct Draft<'a> {
    pub(crate) program: &'a Program,
    pub(crate) topology: &'a Topology,
    costs: &'a CostModel,
    offset: JobOffset,
    /// Number of devices from the job's first device on.
    devices: usize,
    lists: Vec<LoweredList>,
    /// For each list, the groups in which a kernel does more on one member than on another.
    uneven: Vec<BTreeSet<GroupId>>,
}

/// Refuses operators of traced frameworks: no cost model of a Program knows them by name.
fn refuse_traced(stage: &StageProgram, list: &LoweredList) -> Result<(), SimulationError> {
    let traced =
        list.operations.first_instruction.iter().find_map(|&first| match &*stage.instructions[first as usize].operation {
            Operation::Traced { operator, .. } => Some((first as usize, operator)),
            _ => None,
        });
    traced.map_or(Ok(()), |(instruction, operator)| {
        let reason = format!("`{operator}` is an operator of a traced framework, whose step `traced_prediction` times");
        Err(SimulationError::Malformed { stage: stage.stage, instruction, reason })
    })
}

impl<'a> Draft<'a> {
    /// Reads the lists of a Program whose first rank runs on the device that `offset` names.
    pub(crate) fn new(
        program: &'a Program,
        topology: &'a Topology,
        costs: &'a CostModel,
        oversubscription: Oversubscription,
        offset: JobOffset,
        threads: Threads,
    ) -> Result<Self, SimulationError> {
        let world = program.mesh.world_size();
        let devices = topology.device_count().saturating_sub(offset.first_device);
        let in_order = program.lists.windows(2).all(|pair| pair[0].stage <= pair[1].stage);
        let known = program.list_of_rank.iter().all(|&list| (list as usize) < program.lists.len());
        if !in_order || !known || program.list_of_rank.len() != world {
            return Err(SimulationError::ListsOfRanks {
                lists: program.lists.len(),
                given: program.list_of_rank.len(),
                ranks: world,
            });
        }
        if devices == 0 || (world > devices && oversubscription == Oversubscription::Refused) {
            return Err(SimulationError::TooFewDevices { ranks: world, devices, topology: topology.name().into() });
        }
        // Collected before errors are looked at, so that the first list's error is the one
        // reported.
        let lists = match threads {
            Threads::Caller => program.lists.iter().map(LoweredList::new).collect::<Result<Vec<_>, _>>()?,
            Threads::All => {
                let each: Vec<Result<LoweredList, SimulationError>> = program.lists.par_iter().map(LoweredList::new).collect();
                each.into_iter().collect::<Result<Vec<_>, _>>()?
            }
        };
        program.lists.iter().zip(&lists).try_for_each(|(stage, list)| refuse_traced(stage, list))?;
        let uneven = program.lists.iter().zip(&lists).map(|(stage, list)| uneven_groups(stage, list)).collect();
        Ok(Self { program, topology, costs, offset, devices, lists, uneven })
    }

    /// For each list, the groups in which a kernel costs more on one member than on another. Empty
    /// if the software stack balances the parts.
    pub(crate) fn uneven_groups(&self) -> &[BTreeSet<GroupId>] {
        let are_balanced = (0..self.costs.kind_count()).all(|kind| self.costs.balances_parts(kind));
        if are_balanced { &[] } else { &self.uneven }
    }

    /// Whether every rank has its own processor, and the job starts on the topology's first device.
    pub(crate) fn has_own_processors(&self) -> bool {
        self.processors() == self.program.mesh.world_size() && self.offset.first_device == 0
    }

    /// Number of processors that the ranks use. The devices of a lab may share fewer cores.
    fn processors(&self) -> usize {
        let cores = self.costs.cores.unwrap_or(usize::MAX).max(1);
        self.program.mesh.world_size().min(self.devices).min(cores)
    }

    /// Lowers the representatives under `rotation`. Lowers every rank if there is no rotation, or
    /// if the flows of some group are not symmetric under it. Links keep their indices in the
    /// topology, and processors are numbered from 0, until [`Lowered::with_resources_numbered`].
    pub(crate) fn lower(
        self,
        mut rotation: Option<MeshRotation>,
        collectives: Collectives,
    ) -> Result<Lowered<'a>, SimulationError> {
        let Self { program, topology, costs, offset, devices, .. } = self;
        let (mut ranks, pairing) = loop {
            let context = LoweringContext { program, topology, costs, offset, devices, rotation: rotation.as_ref() };
            let mut ranks = context.unconnected_ranks();
            match Pairing::new(&context, &self.lists, collectives, &mut ranks)? {
                Some(pairing) => break (ranks, pairing),
                // This happens only with a rotation.
                None => rotation = None,
            }
        };
        let (times, uncalibrated_kernels) = self.find_times(&mut ranks);
        if collectives == Collectives::Steps
            && let Some(list) = self.lists.iter().position(|list| list.communication_overlaps)
        {
            return Err(SimulationError::Overlapping { stage: program.lists[list].stage });
        }
        let processors = self.processors().min(ranks.len());
        for (index, rank) in ranks.iter_mut().enumerate() {
            rank.processor = (index % devices % processors) as u32;
        }
        let world = program.mesh.world_size();
        let Pairing { groups, channels, hops, communications } = pairing;
        Ok(Lowered {
            sources: program.lists.iter().collect(),
            costs,
            representative_of: rotation
                .as_ref()
                .map_or_else(|| (0..world as u32).collect(), |rotation| rotation.representative_indices(world)),
            ranks,
            lists: self.lists,
            times,
            groups,
            channels,
            hops,
            communications,
            capacities: Vec::new(),
            has_queue: Vec::new(),
            processors,
            uncalibrated_kernels,
            rotation,
        })
    }

    /// The durations of each list's instructions, for each different rank that runs it: by kind of
    /// device, and by position in groups whose kernels are uneven. Also the uncalibrated kernels.
    fn find_times(&self, ranks: &mut [SimulatedRank]) -> (Vec<Vec<ListTimes>>, BTreeSet<String>) {
        let Self { program, costs, lists, uneven, .. } = self;
        let mut uncalibrated_kernels = BTreeSet::new();
        let mut times: Vec<Vec<ListTimes>> = lists.iter().map(|_| Vec::new()).collect();
        let mut known: BTreeMap<(usize, usize, Vec<[usize; 2]>), usize> = BTreeMap::new();
        for rank in ranks {
            let list = &program.lists[rank.list];
            let members = |group: &GroupId| {
                let coordinates = program.mesh.coordinates(rank.rank);
                let mesh = program.mesh.stage_at(coordinates);
                let group = &list.groups[group.0 as usize];
                if costs.balances_parts(rank.kind) {
                    balanced_parts(group.axes.iter().map(|&axis| mesh.size(axis)).product())
                } else {
                    [mesh.part_along(&group.axes, coordinates); 2]
                }
            };
            let members: Vec<[usize; 2]> = uneven[rank.list].iter().map(members).collect();
            rank.times = *known.entry((rank.list, rank.kind, members.clone())).or_insert_with(|| {
                let members_in = |group: GroupId| {
                    let at = uneven[rank.list].iter().position(|&known| known == group);
                    at.and_then(|at| members.get(at)).copied().unwrap_or_default()
                };
                let list = (list, &lists[rank.list]);
                times[rank.list].push(list_times(program, list, costs, rank.kind, &members_in, &mut uncalibrated_kernels));
                times[rank.list].len() - 1
            });
        }
        (times, uncalibrated_kernels)
    }
}
