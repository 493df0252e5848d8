//! A Program made ready to be interpreted: dependencies turned around, durations looked up, the members of groups and the two
//! ends of messages found, routes taken. It is done once, and interpreted at each quantile.
//!
//! It must not know time: nothing here depends on when something happens.

use crate::code::{Code, Joins};
use crate::cost::CostModel;
use crate::debts::indebted_links;
use crate::error::SimulationError;
use crate::interpreter::Run;
use crate::lists::LoweredList;
use crate::network::{self, Shape};
use crate::orbits::Orbits;
use crate::pairing::{Pairing, World};
use crate::parties::{Channel, GroupSet};
use crate::rings::{Collectives, Hop};
use crate::room::{LoadedLinks, links_that_may_be_full};
use crate::simulation::{Options, Oversubscription, Quantile};
use crate::work::{BlockWork, Work, balanced_parts, uneven_groups, work_of};
use foretell_program::{GroupId, Program, Rank, StageProgram};
use foretell_topologies::{DeviceId, Topology};
use rayon::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

/// A Program on a topology.
#[derive(Debug)]
pub(crate) struct Lowered<'a> {
    /// The lists of instructions that ranks run.
    pub(crate) sources: Vec<&'a StageProgram>,
    pub(crate) costs: &'a CostModel,
    /// Who is simulated.
    pub(crate) ranks: Vec<SimulatedRank>,
    /// For each rank of the Program the place of the one that is simulated for it.
    pub(crate) of_rank: Vec<u32>,
    pub(crate) lists: Vec<LoweredList>,
    /// The same as they are run.
    pub(crate) codes: Vec<Code>,
    pub(crate) groups: Vec<GroupSet>,
    pub(crate) channels: Vec<Channel>,
    /// The hops of all rings that are gone round step by step, group by group.
    pub(crate) hops: Vec<Hop>,
    /// How many exchanges there are: those of the groups first, then those of the channels.
    pub(crate) exchanges: u32,
    /// The capacities of what is shared: links that anyone uses, then processors.
    pub(crate) capacities: Vec<f64>,
    /// Of each link among them, whether it is one of a network, whose queues pass the first of a message at once and are busy with it
    /// after the last has arrived.
    pub(crate) has_queue: Vec<bool>,
    /// How many of these are processors, which come last.
    pub(crate) processors: usize,
    /// Kernels that no sample says anything of.
    pub(crate) uncalibrated_kernels: BTreeSet<String>,
    /// What ranks were turned onto each other before they were made ready, if any were.
    pub(crate) orbits: Option<Orbits>,
}

/// A rank that has not met anybody yet.
fn rank_of(world: &World<'_>, placement: Placement, rank: Rank) -> SimulatedRank {
    let device = world.device(rank);
    SimulatedRank {
        rank,
        device,
        kind: placement.first_kind + world.topology.kind_index(device),
        list: world.program.list_index(rank),
        work: 0,
        processor: 0,
        groups: Vec::new(),
        sends: Vec::new(),
        receives: Vec::new(),
    }
}

/// A rank that is simulated.
#[derive(Clone, Debug)]
pub(crate) struct SimulatedRank {
    pub(crate) rank: Rank,
    pub(crate) device: DeviceId,
    /// The kind of its device.
    pub(crate) kind: usize,
    /// Which of the Program's lists it runs.
    pub(crate) list: usize,
    /// Which of the list's [`LoweredList::work`] is its own.
    pub(crate) work: usize,
    /// Its processor's place among what is shared.
    pub(crate) processor: u32,
    /// For each group of its list, the place in [`Lowered::groups`].
    pub(crate) groups: Vec<u32>,
    /// For each peer that it sends to, the place in [`Lowered::channels`]; and for each that it receives from.
    pub(crate) sends: Vec<u32>,
    pub(crate) receives: Vec<u32>,
}

/// On how many threads lists are made ready.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Threads {
    All,
    /// The caller's, where Programs are shared out among threads and not their lists: one that waited for its lists would take up another Program
    /// meanwhile, and so on without an end.
    One,
}

/// Where on a topology a Program runs, and which of the costs are its own: several run on one beside each other.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Placement {
    /// The device of its first rank.
    pub(crate) first_device: usize,
    /// The kind of costs that is the topology's first kind of device.
    pub(crate) first_kind: usize,
}

impl<'a> Lowered<'a> {
    pub(crate) fn new(
        program: &'a Program,
        topology: &'a Topology,
        costs: &'a CostModel,
        options: &Options,
        threads: Threads,
        turning: Option<&[f64]>,
    ) -> Result<Self, SimulationError> {
        let placed = Self::placed(program, topology, costs, options, Placement::default(), threads, turning)?;
        Ok(placed.with_resources_numbered(topology))
    }

    /// The same on the devices from a certain one on, with links numbered as the topology has them, and processors from 0: what is shared is
    /// numbered when it is known who else is there.
    pub(crate) fn placed(
        program: &'a Program,
        topology: &'a Topology,
        costs: &'a CostModel,
        options: &Options,
        placement: Placement,
        threads: Threads,
        turning: Option<&[f64]>,
    ) -> Result<Self, SimulationError> {
        let world = program.mesh.world_size();
        let devices = topology.device_count().saturating_sub(placement.first_device);
        let in_order = program.lists.windows(2).all(|pair| pair[0].stage <= pair[1].stage);
        let known = program.list_of_rank.iter().all(|&list| (list as usize) < program.lists.len());
        if !in_order || !known || program.list_of_rank.len() != world {
            return Err(SimulationError::ListsOfRanks {
                lists: program.lists.len(),
                given: program.list_of_rank.len(),
                ranks: world,
            });
        }
        if devices == 0 || (world > devices && options.oversubscription == Oversubscription::Refused) {
            return Err(SimulationError::TooFewDevices { ranks: world, devices, topology: topology.name().into() });
        }
        // Of several mistakes the first is told.
        let mut lists = match threads {
            Threads::One => program.lists.iter().map(LoweredList::new).collect::<Result<Vec<_>, _>>()?,
            Threads::All => {
                let each: Vec<Result<LoweredList, SimulationError>> = program.lists.par_iter().map(LoweredList::new).collect();
                each.into_iter().collect::<Result<Vec<_>, _>>()?
            }
        };
        let uneven: Vec<BTreeSet<GroupId>> =
            program.lists.iter().zip(&lists).map(|(stage, list)| uneven_groups(stage, list)).collect();
        let are_balanced = (0..costs.kind_count()).all(|kind| costs.balances_parts(kind));
        // A lab's devices may be fewer cores.
        let processors = world.min(devices).min(costs.cores.unwrap_or(usize::MAX).max(1));
        let orbits = turning.filter(|_| processors == world && placement.first_device == 0);
        let mut orbits = orbits.and_then(|paces| Orbits::new(program, topology, paces, if are_balanced { &[] } else { &uneven }));
        let (mut ranks, pairing) = loop {
            let orbits_now = orbits.as_ref();
            let world = World { program, topology, costs, first_device: placement.first_device, devices, orbits: orbits_now };
            let mut ranks: Vec<SimulatedRank> = world.ranks().into_iter().map(|rank| rank_of(&world, placement, rank)).collect();
            match Pairing::new(&world, &lists, options.collectives, &mut ranks)? {
                Some(pairing) => break (ranks, pairing),
                // Never without orbits.
                None => orbits = None,
            }
        };
        let mut uncalibrated_kernels = BTreeSet::new();
        let mut known: BTreeMap<(usize, usize, Vec<[usize; 2]>), usize> = BTreeMap::new();
        for rank in &mut ranks {
            let list = &program.lists[rank.list];
            let place = |group: &GroupId| {
                let coordinates = program.mesh.coordinates(rank.rank);
                let mesh = program.mesh.stage_at(coordinates);
                let Some(group) = list.groups.get(group.0 as usize) else { return [0; 2] };
                if costs.balances_parts(rank.kind) {
                    balanced_parts(group.axes.iter().map(|&axis| mesh.size(axis)).product())
                } else {
                    [mesh.part_along(&group.axes, coordinates); 2]
                }
            };
            let places: Vec<[usize; 2]> = uneven[rank.list].iter().map(place).collect();
            let lowered = &mut lists[rank.list];
            rank.work = *known.entry((rank.list, rank.kind, places.clone())).or_insert_with(|| {
                let places_in = |group: GroupId| {
                    let at = uneven[rank.list].iter().position(|&one| one == group);
                    at.and_then(|at| places.get(at)).copied().unwrap_or_default()
                };
                let work = work_of(program, (list, lowered), costs, rank.kind, &places_in, &mut uncalibrated_kernels);
                lowered.work.push(work);
                lowered.work.len() - 1
            });
        }
        let codes = codes(program, &lists, threads);
        if options.collectives == Collectives::Steps
            && let Some(list) = codes.iter().position(|code| code.exchanges_overlap)
        {
            return Err(SimulationError::Overlapping { stage: program.lists[list].stage });
        }
        let Pairing { groups, channels, hops, exchanges } = pairing;
        let processors = processors.min(ranks.len());
        for (place, rank) in ranks.iter_mut().enumerate() {
            rank.processor = (place % devices % processors) as u32;
        }
        Ok(Self {
            sources: program.lists.iter().collect(),
            costs,
            codes,
            of_rank: orbits.as_ref().map_or_else(|| (0..world as u32).collect(), |orbits| orbits.places(world)),
            ranks,
            lists,
            groups,
            channels,
            hops,
            exchanges,
            capacities: Vec::new(),
            has_queue: Vec::new(),
            processors,
            uncalibrated_kernels,
            orbits,
        })
    }

    /// This and another, whose costs are the same and whose devices are others, before the links of either are numbered. The ranks of the other
    /// come after its own.
    pub(crate) fn beside(mut self, mut other: Self) -> Self {
        let (lists, ranks, processors) = (self.lists.len(), self.ranks.len() as u32, self.processors as u32);
        let (groups, channels) = (self.groups.len() as u32, self.channels.len() as u32);
        for rank in &mut other.ranks {
            rank.list += lists;
            rank.processor += processors;
            rank.groups.iter_mut().for_each(|group| *group += groups);
            rank.sends.iter_mut().chain(&mut rank.receives).for_each(|channel| *channel += channels);
        }
        let hops = self.hops.len() as u32;
        for hop in &mut other.hops {
            hop.group += groups;
            hop.sender += ranks;
            hop.receiver += ranks;
            hop.before += hops;
            hop.after += hops;
        }
        for group in &mut other.groups {
            group.hops = group.hops.start + hops..group.hops.end + hops;
        }
        other.of_rank.iter_mut().for_each(|place| *place += ranks);
        other.groups.iter_mut().flat_map(|group| &mut group.members).for_each(|(member, _)| *member += ranks);
        for channel in &mut other.channels {
            channel.sender += ranks;
            channel.receiver += ranks;
        }
        self.sources.append(&mut other.sources);
        self.lists.append(&mut other.lists);
        self.codes.append(&mut other.codes);
        self.hops.append(&mut other.hops);
        self.ranks.append(&mut other.ranks);
        self.of_rank.append(&mut other.of_rank);
        self.groups.append(&mut other.groups);
        self.channels.append(&mut other.channels);
        self.uncalibrated_kernels.append(&mut other.uncalibrated_kernels);
        self.processors += other.processors;
        self.number_exchanges();
        self
    }

    /// Numbers what is shared: first the links that some exchange uses and that may be full, then the processors that ranks run on.
    pub(crate) fn with_resources_numbered(mut self, topology: &Topology) -> Self {
        let used = self.used_links(topology);
        let mut number = vec![u32::MAX; topology.links().len()];
        used.iter().zip(0..).for_each(|(&link, place)| number[link] = place);
        let renumber = |shape: &mut Shape| {
            shape.turns = Vec::new();
            shape.loads.retain(|&(link, _)| number[link] != u32::MAX);
            shape.loads.iter_mut().for_each(|(link, _)| *link = number[*link] as usize);
        };
        self.groups.iter_mut().flat_map(GroupSet::shapes_mut).flatten().for_each(renumber);
        self.channels.iter_mut().map(|channel| &mut channel.shape).for_each(renumber);
        self.hops.iter_mut().map(|hop| &mut hop.shape).for_each(renumber);
        self.capacities = used.iter().map(|&link| network::capacity(topology, &self.costs.links, link)).collect();
        self.has_queue = used.iter().map(|&link| network::has_queue(topology, link)).collect();
        let links = self.capacities.len();
        self.capacities.resize(links + self.processors, 1.0);
        for rank in &mut self.ranks {
            rank.processor += links as u32;
        }
        self
    }

    /// The links that exchanges share: those that some exchange uses, less those that cannot be full.
    fn used_links(&self, topology: &Topology) -> Vec<usize> {
        let Self { groups, channels, hops, costs, .. } = self;
        // One channel or hop has one message at a time.
        let singles = || channels.iter().map(|channel| &channel.shape).chain(hops.iter().map(|hop| &hop.shape));
        let shapes = || groups.iter().flat_map(GroupSet::shapes).flatten().chain(singles());
        if self.codes.iter().any(|code| code.exchanges_overlap) {
            return shapes().flat_map(Shape::links).collect::<BTreeSet<_>>().into_iter().collect();
        }
        let parties = groups.iter().map(GroupSet::shapes).chain(singles().map(|shape| [Some(shape), None, None, None]));
        let parties = parties.map(|shapes| shapes.into_iter().flatten().flat_map(Shape::links));
        let capacity = |link| network::capacity(topology, &costs.links, link);
        // What takes less than a link carries keeps its queue busy for whoever comes next.
        let indebted = indebted_links(self, topology);
        let turns = shapes().flat_map(|shape| &shape.turns);
        let loaded = LoadedLinks::new(topology.links().len(), shapes().flat_map(Shape::links));
        links_that_may_be_full(&loaded, parties, turns, capacity, |link| indebted[link], self.orbits.as_ref())
    }

    /// Numbers the exchanges anew: those of the groups first, then those of the channels.
    pub(crate) fn number_exchanges(&mut self) {
        let mut next = 0;
        for group in &mut self.groups {
            group.first_exchange = next;
            next += group.collectives.len() as u32;
        }
        for channel in &mut self.channels {
            channel.first_exchange = next;
            next += channel.bytes.len() as u32;
        }
        self.exchanges = next;
    }

    /// Whether several ranks run on a processor.
    pub(crate) fn shares_processors(&self) -> bool {
        self.ranks.len() > self.processors
    }

    /// The share of its processor's time that a rank's device has in the long run, where it is less than all. A budget is a processor's: where ranks
    /// share one, each goes at its share's pace all the time.
    pub(crate) fn quota(&self, rank: &SimulatedRank) -> Option<f64> {
        self.costs.quota(rank.kind).filter(|_| !self.shares_processors())
    }

    /// Whether any rank's device has such a share.
    pub(crate) fn has_quotas(&self) -> bool {
        self.ranks.iter().any(|rank| self.quota(rank).is_some())
    }

    /// A rank's list, and what its instructions take.
    pub(crate) fn work(&self, rank: usize) -> (&LoweredList, &Work) {
        let rank = &self.ranks[rank];
        let list = &self.lists[rank.list];
        (list, &list.work[rank.work])
    }

    /// What each block of each list takes at a quantile, for each [`LoweredList::work`] of the list.
    pub(crate) fn work_of_blocks(&self, quantile: Quantile) -> Vec<Vec<Vec<BlockWork>>> {
        let of_list = |(list, code): (&LoweredList, &Code)| {
            let blocks = |work: &Work| {
                let of_block = |block| work.of_block(list, code.instructions(block), quantile);
                code.blocks.iter().map(of_block).collect()
            };
            list.work.iter().map(blocks).collect()
        };
        self.lists.iter().zip(&self.codes).map(of_list).collect()
    }

    /// Where processors begin among what is shared.
    pub(crate) fn first_processor(&self) -> usize {
        self.capacities.len() - self.processors
    }

    /// Everything that was answered by a data sheet.
    pub(crate) fn uncalibrated(&self, run: &Run) -> Vec<String> {
        self.uncalibrated_kernels.iter().chain(&run.uncalibrated).cloned().collect::<BTreeSet<_>>().into_iter().collect()
    }

    /// An instruction in words.
    pub(crate) fn describe(&self, rank: usize, instruction: u32) -> String {
        let rank = &self.ranks[rank];
        let stage = self.sources[rank.list];
        match stage.instructions.get(instruction as usize) {
            Some(one) => {
                let name = stage.names.get(one.name as usize).map_or("", String::as_str);
                format!("{} in instruction {instruction} (`{}` of `{name}`)", rank.rank, one.operation.kind())
            }
            None => format!("{} in instruction {instruction}", rank.rank),
        }
    }
}

/// The lists as they are run. Where the host's launches say when a kernel may begin, each is looked at by itself.
pub(crate) fn codes(program: &Program, lists: &[LoweredList], threads: Threads) -> Vec<Code> {
    let code = |(list, lowered): (&StageProgram, &LoweredList)| {
        let is_launched_ahead = lowered.work.iter().all(|work| work.launched.is_empty());
        Code::new(list, lowered, if is_launched_ahead { Joins::Kernels } else { Joins::Nothing })
    };
    match threads {
        Threads::One => program.lists.iter().zip(lists).map(code).collect(),
        Threads::All => program.lists.par_iter().zip(lists).map(code).collect(),
    }
}
