//! A Program made ready to be interpreted: dependencies turned around, durations looked up, the members of groups and the two
//! ends of messages found, routes taken. It is done once, and interpreted at each quantile.
//!
//! It must not know time: nothing here depends on when something happens.

use crate::code::{Code, Joins};
use crate::cost::{CostModel, HostWaits, KernelCost, Source};
use crate::error::SimulationError;
use crate::hash::FastMap;
use crate::interpreter::Run;
use crate::network::{self, Shape};
use crate::pairing::{Channel, GroupSet, Pairing};
use crate::rings::{Collectives, Hop};
use crate::room::links_that_may_be_full;
use crate::simulation::{Options, Oversubscription, Quantile};
use foretell_models::Kernel;
use foretell_program::{GroupId, Operation, PeerId, Phase, Program, Rank, StageProgram};
use foretell_topologies::{DeviceId, Topology};
use foretell_units::{Picoseconds, Seconds};
use std::collections::{BTreeMap, BTreeSet, HashMap};

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

/// What a list's instruction is to the interpreter.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    /// Work for the processor.
    Compute,
    /// Samples to read.
    Load,
    /// The `nth` collective of a group of the list.
    Collective { group: u32, nth: u32 },
    /// The `nth` message to the list's `peer`-th receiver.
    Send { peer: u32, nth: u32 },
    /// The `nth` message from the list's `peer`-th sender.
    Receive { peer: u32, nth: u32 },
}

/// The instructions of a list.
#[derive(Debug)]
pub(crate) struct LoweredList {
    pub(crate) steps: Vec<Step>,
    /// The collectives of each group, in order.
    pub(crate) collectives: Vec<Vec<u32>>,
    /// Messages to and from peers, in order.
    pub(crate) sends: Vec<Messages>,
    pub(crate) receives: Vec<Messages>,
    /// The work of each instruction at each quantile: one list for each kind of device that runs it and, where kernels do more on one
    /// member of a group than on another, each place in those groups.
    pub(crate) work: Vec<Work>,
    /// How many micro-batches it has.
    pub(crate) micro_batches: u32,
}

/// What the instructions of a list take on a kind of device.
#[derive(Debug, Default)]
pub(crate) struct Work {
    /// Of the processor, at each quantile.
    pub(crate) durations: Vec<[Picoseconds; 3]>,
    /// When the host has launched it, if it never waits; empty where launches take no time.
    pub(crate) launched: Vec<Picoseconds>,
    /// Whether the host launches nothing more before it has ended; empty where launches take no time.
    pub(crate) host_waits: Vec<bool>,
}

/// The messages to or from one peer.
#[derive(Clone, Debug)]
pub(crate) struct Messages {
    pub(crate) peer: PeerId,
    pub(crate) instructions: Vec<u32>,
}

/// Where on a topology a Program runs, and which of the costs are its own: several run on one beside each other.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Placement {
    /// The device of its first rank.
    pub(crate) first_device: usize,
    /// The kind of costs that is the topology's first kind of device.
    pub(crate) first_kind: usize,
}

const QUANTILES: [Quantile; 3] = [Quantile::P10, Quantile::Median, Quantile::P90];

impl<'a> Lowered<'a> {
    pub(crate) fn new(
        program: &'a Program,
        topology: &'a Topology,
        costs: &'a CostModel,
        options: &Options,
    ) -> Result<Self, SimulationError> {
        let placed = Self::placed(program, topology, costs, options, Placement::default())?;
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
        let mut lists: Vec<LoweredList> = program.lists.iter().map(LoweredList::new).collect::<Result<_, _>>()?;
        let mut ranks: Vec<SimulatedRank> = (0..world)
            .map(|rank| {
                let device = DeviceId(placement.first_device + rank % devices);
                SimulatedRank {
                    rank: Rank(rank),
                    device,
                    kind: placement.first_kind + topology.kind_index(device),
                    list: program.list_index(Rank(rank)),
                    work: 0,
                    processor: 0,
                    groups: Vec::new(),
                    sends: Vec::new(),
                    receives: Vec::new(),
                }
            })
            .collect();
        let mut uncalibrated_kernels = BTreeSet::new();
        let uneven: Vec<BTreeSet<GroupId>> = program.lists.iter().map(uneven_groups).collect();
        let mut known: BTreeMap<(usize, usize, Vec<usize>), usize> = BTreeMap::new();
        for rank in &mut ranks {
            let list = &program.lists[rank.list];
            let place = |group: &GroupId| {
                let coordinates = program.mesh.coordinates(rank.rank);
                let mesh = program.mesh.stage_at(coordinates);
                list.groups.get(group.0 as usize).map_or(0, |group| mesh.part_along(&group.axes, coordinates))
            };
            let places: Vec<usize> = uneven[rank.list].iter().map(place).collect();
            let work = &mut lists[rank.list].work;
            rank.work = *known.entry((rank.list, rank.kind, places.clone())).or_insert_with(|| {
                let place_in = |group: GroupId| {
                    uneven[rank.list].iter().position(|&one| one == group).and_then(|at| places.get(at)).copied().unwrap_or(0)
                };
                work.push(work_of(program, list, costs, rank.kind, &place_in, &mut uncalibrated_kernels));
                work.len() - 1
            });
        }
        let codes = codes(program, &lists);
        if options.collectives == Collectives::Steps
            && let Some(list) = codes.iter().position(|code| code.exchanges_overlap)
        {
            return Err(SimulationError::Overlapping { stage: program.lists[list].stage });
        }
        let pairing = Pairing::new(program, topology, costs, &lists, options.collectives, &mut ranks)?;
        let Pairing { groups, channels, hops, exchanges } = pairing;
        // A lab's devices may be fewer cores.
        let processors = ranks.len().min(devices).min(costs.cores.unwrap_or(usize::MAX).max(1));
        for rank in &mut ranks {
            rank.processor = ((rank.device.0 - placement.first_device) % processors) as u32;
        }
        Ok(Self {
            sources: program.lists.iter().collect(),
            costs,
            codes,
            of_rank: (0..ranks.len() as u32).collect(),
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
        let number: HashMap<usize, usize> = used.iter().enumerate().map(|(number, &link)| (link, number)).collect();
        let renumber = |shape: &mut Shape| {
            shape.turns = Vec::new();
            let numbered = |&(link, load): &(usize, f64)| Some((*number.get(&link)?, load));
            shape.loads = shape.loads.iter().filter_map(numbered).collect();
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
    fn used_links(&self, topology: &Topology) -> BTreeSet<usize> {
        let Self { groups, channels, hops, costs, .. } = self;
        let links = |shape: &Shape| shape.loads.iter().map(|&(link, _)| link).collect::<Vec<_>>();
        let of_groups = groups.iter().map(|group| group.shapes().into_iter().flatten().flat_map(links).collect());
        // One channel or hop has one message at a time.
        let singles = || channels.iter().map(|channel| &channel.shape).chain(hops.iter().map(|hop| &hop.shape));
        let parties = of_groups.chain(singles().map(links));
        if self.codes.iter().any(|code| code.exchanges_overlap) {
            return parties.flatten().collect();
        }
        let shapes = groups.iter().flat_map(GroupSet::shapes).flatten().chain(singles());
        let capacity = |link| network::capacity(topology, &costs.links, link);
        // What was measured faster than a link carries keeps its queue busy for whoever comes next.
        let are_queues_paid =
            (0..costs.kind_count()).any(|kind| costs.exchanges(kind).is_some() || costs.graphics(kind).is_some());
        let has_queue = |link: usize| are_queues_paid && network::has_queue(topology, link);
        links_that_may_be_full(parties, shapes.flat_map(|shape| &shape.turns), capacity, has_queue)
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

    /// What the instructions of a rank take, quantiles in the order of [`Quantile`].
    pub(crate) fn work(&self, rank: usize) -> &Work {
        let rank = &self.ranks[rank];
        &self.lists[rank.list].work[rank.work]
    }

    /// What each block of each list takes at a quantile, for each [`LoweredList::work`] of the list.
    pub(crate) fn work_of_blocks(&self, quantile: Quantile) -> Vec<Vec<Vec<Picoseconds>>> {
        let of_block = |work: &Work, instructions: &[u32]| {
            instructions.iter().fold(Picoseconds::ZERO, |sum, &one| sum + work.durations[one as usize][quantile as usize])
        };
        let of_list = |(list, code): (&LoweredList, &Code)| {
            let blocks = |work: &Work| code.blocks.iter().map(|block| of_block(work, code.instructions(block))).collect();
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

impl LoweredList {
    pub(crate) fn new(stage: &StageProgram) -> Result<Self, SimulationError> {
        let count = stage.instructions.len();
        let malformed =
            |instruction: usize, reason: String| SimulationError::Malformed { stage: stage.stage, instruction, reason };
        let mut lowered = Self {
            steps: Vec::with_capacity(count),
            collectives: vec![Vec::new(); stage.groups.len()],
            sends: Vec::new(),
            receives: Vec::new(),
            work: Vec::new(),
            micro_batches: stage.instructions.iter().filter_map(|one| one.micro_batch).max().map_or(0, |last| last + 1),
        };
        for (index, instruction) in stage.instructions.iter().enumerate() {
            if instruction.stream.0 as usize >= stage.streams.len() {
                return Err(malformed(index, format!("there is no stream {}", instruction.stream.0)));
            }
            if let Some(before) = instruction.after.iter().find(|before| before.0 as usize >= count) {
                return Err(malformed(index, format!("it waits for instruction {}, which there is not", before.0)));
            }
            let step = lowered.step(stage, index).map_err(|reason| malformed(index, reason))?;
            lowered.steps.push(step);
        }
        Ok(lowered)
    }

    fn step(&mut self, list: &StageProgram, index: usize) -> Result<Step, String> {
        let check = |peer: PeerId| match list.peers.get(peer.0 as usize) {
            Some(_) => Ok(peer),
            None => Err(format!("there is no peer {}", peer.0)),
        };
        Ok(match list.instructions[index].operation {
            Operation::Compute { .. } => Step::Compute,
            Operation::Load { .. } => Step::Load,
            Operation::Collective { group, .. } => {
                let list = self.collectives.get_mut(group.0 as usize).ok_or_else(|| format!("there is no group {}", group.0))?;
                list.push(index as u32);
                Step::Collective { group: u32::from(group.0), nth: list.len() as u32 - 1 }
            }
            Operation::Send { peer, .. } => {
                let (peer, nth) = add_message(&mut self.sends, check(peer)?, index);
                Step::Send { peer, nth }
            }
            Operation::Receive { peer, .. } => {
                let (peer, nth) = add_message(&mut self.receives, check(peer)?, index);
                Step::Receive { peer, nth }
            }
        })
    }
}

fn add_message(known: &mut Vec<Messages>, peer: PeerId, instruction: usize) -> (u32, u32) {
    let position = known.iter().position(|messages| messages.peer == peer).unwrap_or_else(|| {
        known.push(Messages { peer, instructions: Vec::new() });
        known.len() - 1
    });
    let list = &mut known[position].instructions;
    list.push(instruction as u32);
    (position as u32, list.len() as u32 - 1)
}

/// The groups in which some kernel of a stage does more on one member than on another: causal attention of a part of the positions.
pub(crate) fn uneven_groups(stage: &StageProgram) -> BTreeSet<GroupId> {
    let uneven = stage.instructions.iter().filter_map(|instruction| match instruction.operation {
        Operation::Compute { kernel, group, .. } if kernel.for_member(0) != kernel => group,
        _ => None,
    });
    uneven.collect()
}

/// The work of each instruction of a stage on a kind of device, at each quantile, for the rank that has the place `place_in` says in each
/// group. Each distinct kernel is estimated once.
pub(crate) fn work_of(
    program: &Program,
    stage: &StageProgram,
    costs: &CostModel,
    kind: usize,
    place_in: &dyn Fn(GroupId) -> usize,
    uncalibrated: &mut BTreeSet<String>,
) -> Work {
    let parameters = costs.parameters(kind);
    // Only looked up, never walked through, so that its order does not matter.
    let mut known: FastMap<(Kernel, bool), ([Picoseconds; 3], Seconds)> = FastMap::default();
    let each = |time: &dyn Fn(Quantile) -> Seconds| QUANTILES.map(|quantile| Picoseconds::from(time(quantile)));
    let exchange_launch = costs.exchange_launch(kind);
    let instructions = stage.instructions.iter();
    let (durations, launches): (Vec<_>, Vec<_>) = instructions
        .map(|instruction| {
            let (work, launch) = match instruction.operation {
                Operation::Compute { kernel, accumulate, group } => {
                    let kernel = group.map_or(kernel, |group| kernel.for_member(place_in(group)));
                    *known.entry((kernel, accumulate)).or_insert_with(|| {
                        let KernelCost { time: estimate, launch } =
                            costs.kernel_cost(&kernel, accumulate, program.precision, kind);
                        if !estimate.source.is_calibrated() {
                            let why = if estimate.source == Source::Extrapolated { ", far from any sample" } else { "" };
                            let (name, device) = (kernel.name(), costs.kind_name(kind));
                            uncalibrated.insert(format!("{name} in {} on {device}{why}", program.precision));
                        }
                        let work = each(&|quantile| estimate.at(quantile) + parameters.instruction_overhead.at(quantile));
                        (work, launch)
                    })
                }
                Operation::Load { .. } => {
                    let buffers = instruction.writes.iter().filter_map(|buffer| stage.buffers.get(buffer.0 as usize));
                    let bytes: f64 = buffers.map(|buffer| buffer.bytes.value()).sum();
                    (each(&|_| parameters.load_seconds_per_byte * bytes), Seconds::ZERO)
                }
                Operation::Collective { .. } | Operation::Send { .. } => ([Picoseconds::ZERO; 3], exchange_launch),
                Operation::Receive { .. } => ([Picoseconds::ZERO; 3], Seconds::ZERO),
            };
            (work, Picoseconds::from(launch * costs.launch_share(kind, instruction.phase)))
        })
        .unzip();
    let mut host = Picoseconds::ZERO;
    let launched = launches.iter().map(|&launch| {
        host += launch;
        host
    });
    let launched: Vec<Picoseconds> = launched.collect();
    // Where the host has nothing to do, it says nothing.
    if host == Picoseconds::ZERO {
        return Work { durations, ..Work::default() };
    }
    Work { durations, launched, host_waits: host_waits(stage, parameters.host_waits) }
}

/// What a host waits for: messages, or the last kernel of each pass over a micro-batch.
fn host_waits(stage: &StageProgram, waits: HostWaits) -> Vec<bool> {
    let mut found: Vec<bool> = vec![false; stage.instructions.len()];
    let mut last: Option<(usize, (bool, Option<u32>))> = None;
    for (index, instruction) in stage.instructions.iter().enumerate() {
        match instruction.operation {
            Operation::Receive { .. } => found[index] = waits.for_messages,
            Operation::Compute { .. } if waits.between_passes && instruction.phase != Phase::Update => {
                let pass = (instruction.phase == Phase::Forward, instruction.micro_batch);
                if let Some((before, _)) = last.filter(|(_, other)| *other != pass) {
                    found[before] = true;
                }
                last = Some((index, pass));
            }
            _ => {}
        }
    }
    found
}

/// The lists as they are run. Where the host's launches say when a kernel may begin, each is looked at by itself.
pub(crate) fn codes(program: &Program, lists: &[LoweredList]) -> Vec<Code> {
    let code = |(list, lowered): (&StageProgram, &LoweredList)| {
        let is_launched_ahead = lowered.work.iter().all(|work| work.launched.is_empty());
        Code::new(list, lowered, if is_launched_ahead { Joins::Kernels } else { Joins::Nothing })
    };
    program.lists.iter().zip(lists).map(code).collect()
}
