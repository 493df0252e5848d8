//! The search: families of layouts in the order of their bounds, then their members, then the simulator, until no bound left can be among
//! the best.

mod hosts;

use crate::answer::{Candidate, Planned, PlannerError, Search, USUAL_MEND, no_layout, nothing_left};
use crate::bounds::{Bounds, Verdict};
use crate::objective::Objective;
use crate::placements::with_placed_operators;
use crate::queue::{Member, Open, What, in_groups};
use crate::request::Request;
use crate::space::Family;
use foretell_program::{Footprint, Layout, MOST_RANKS, MOST_SAMPLES, Plan, Program, Recompute};
use foretell_simulator::{
    Deadline, Folding, Options, Prediction, Recording, SimulationError, device_memory_by_stage, host_memory, predict_with,
};
use foretell_topologies::Architecture;
use foretell_units::{Bytes, Seconds};
use rayon::prelude::*;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::sync::Arc;

/// Families that are opened, and layouts that are simulated, before the incumbents are looked at again: fixed, so that the answer does not depend on
/// the number of threads. The first layouts are few, as often nothing has to be simulated after them.
const FAMILIES_AT_ONCE: usize = 16;
const FIRST_SIMULATIONS: usize = 2;
const SIMULATIONS_AT_ONCE: usize = 4;

/// Families that are bounded together.
const FAMILIES_BOUNDED_AT_ONCE: usize = 128;

/// How far above the least bound another may be for a layout to be simulated at once, of those that one Program tells of, or of those of one round:
/// simulations of the best are 1-3 % above their bounds, so that what is further up will hardly have to be.
const NEAR: f64 = 1.02;

/// Spaces of fewer layouts, each counted once whether it offloads or not, are searched until no gap is left.
const SMALL: usize = 512;

/// Finds the best layouts.
///
/// # Errors
/// [`PlannerError`]: the model's or the request's sizes leave no layout, or none that fits.
pub fn plan(request: &Request<'_>) -> Result<Planned, PlannerError> {
    let devices = request.devices;
    if devices > MOST_RANKS {
        return Err(no_layout(request, format!("more than {MOST_RANKS} are not laid out"), "use fewer nodes"));
    }
    if request.base.global_batch > MOST_SAMPLES {
        return Err(no_layout(request, format!("a step has {MOST_SAMPLES} samples at most"), "use a smaller global batch"));
    }
    request.objective.check(request)?;
    let bounds = Bounds::new(request)?;
    if let Some(refusal) = bounds.refusal_by_state() {
        return Err(refusal);
    }
    Searcher {
        request,
        bounds,
        search: Search::default(),
        resident: 0,
        misfits: hosts::Misfits::default(),
        fitted: BTreeMap::new(),
        heap: BinaryHeap::new(),
        kept: Vec::new(),
        least: None,
        reason: None,
    }
    .run()
}

/// A layout that was simulated and fits. Its Program is not kept: it may have hundreds of megabytes, and memory that is touched for the first time is
/// most of what it costs to have several.
struct Kept {
    value: f64,
    index: (usize, usize),
    plan: Plan,
    /// What is foretold of it, where the simulation that decided says all of that.
    foretold: Option<Foretold>,
}

/// What is said of a training step, and of the devices of each stage.
struct Foretold {
    prediction: Prediction,
    /// What the fullest of them holds: our executor the arena, another framework what its profile says.
    memory: Vec<Bytes>,
    /// By component, where that is another framework's.
    by_component: Vec<Footprint>,
    /// What a byte on them counts ([`Devices::weights_of_stages`](crate::devices::Devices::weights_of_stages)).
    weights: Vec<f64>,
}

/// What became of a layout that was to be simulated.
enum Fate {
    Indivisible(String),
    /// By stage, what the fullest device holds, weighed.
    OutOfMemory(Vec<f64>),
    OutOfHostMemory,
    /// It cannot be the best: its value is at least this.
    Beaten(f64),
    Simulated(Box<Kept>),
}

/// What became of the first of some layouts that one Program tells of, if there is one; and the Program, if there are others.
struct Begun {
    program: Option<Program>,
    fate: Option<Fate>,
}

/// The value of a layout that was simulated to its end.
fn value_of(fate: &Fate) -> Option<f64> {
    match fate {
        Fate::Simulated(kept) => Some(kept.value),
        _ => None,
    }
}

struct Searcher<'a> {
    request: &'a Request<'a>,
    bounds: Bounds<'a>,
    search: Search,
    /// Layouts in the space, not counted again with something on the hosts.
    resident: usize,
    misfits: hosts::Misfits,
    /// Of layouts that were fitted anew, how many times, and the room that their stages then had.
    fitted: BTreeMap<(usize, usize), (usize, Vec<f64>)>,
    heap: BinaryHeap<Reverse<Open>>,
    /// The best so far, in order.
    kept: Vec<Kept>,
    /// The least memory of what does not fit.
    least: Option<Bytes>,
    /// What the compiler said of a layout.
    reason: Option<String>,
}

impl Searcher<'_> {
    fn run(mut self) -> Result<Planned, PlannerError> {
        self.open_space();
        let (foretold, left) = loop {
            let left = self.look_at_all()?;
            if let Some(value) = self.request.elsewhere {
                self.kept.retain(|kept| kept.value < value);
                if self.kept.is_empty() {
                    break (Vec::new(), left);
                }
            }
            if self.kept.is_empty() {
                return Err(nothing_left(
                    self.request,
                    self.bounds.space.blocks,
                    self.least,
                    self.bounds.memory_limit,
                    self.reason,
                ));
            }
            if let Some(foretold) = self.with_evaluation()? {
                break (foretold, left);
            }
        };
        self.search.bounded_out += self.heap.iter().map(|Reverse(open)| self.layouts_of(open)).sum::<usize>();
        self.search.stopped = self.heap.iter().map(|Reverse(open)| open.stopped()).sum();
        Ok(self.answer(foretold, left))
    }

    /// Goes on until nothing left can be among the best; the least bound of what is left.
    fn look_at_all(&mut self) -> Result<Option<f64>, PlannerError> {
        while let Some(Reverse(next)) = self.heap.peek() {
            if self.may_give_up() {
                return Err(self.out_of_time());
            }
            if self.is_settled(next.bound) {
                return Ok(Some(next.bound));
            }
            match next.what {
                What::Unbounded(_) => self.bound_families()?,
                What::Family(_) => self.open_families(),
                What::Members(_) => self.simulate_members()?,
            }
        }
        Ok(None)
    }

    fn layouts_of(&self, open: &Open) -> usize {
        match &open.what {
            What::Unbounded(family) | What::Family(family) => {
                self.bounds.space.members(family).len() * self.bounds.forms(&family.layout)
            }
            What::Members(members) => members.iter().map(|member| self.bounds.forms(&member.layout)).sum(),
        }
    }

    /// Whether nothing with this bound or a greater one has to be looked at any more.
    fn is_settled(&self, bound: f64) -> bool {
        let elsewhere = self.request.elsewhere;
        let is_known = !self.kept.is_empty() || elsewhere.is_some();
        if is_known && (self.request.stop)() || elsewhere.is_some_and(|value| self.is_beaten(bound, value, value)) {
            return true;
        }
        let Some(worst) = self.kept.get(self.request.top.max(1) - 1) else { return false };
        self.is_beaten(bound, self.kept[0].value, worst.value)
    }

    /// Whether nothing with this bound or a greater one has to be looked at where these are the best, and the worst of those to be returned.
    fn is_beaten(&self, bound: f64, best: f64, worst: f64) -> bool {
        bound > worst || self.resident >= SMALL && best <= bound * (1.0 + self.request.tolerance)
    }

    fn may_give_up(&self) -> bool {
        self.kept.is_empty() && self.request.elsewhere.is_none() && (self.request.give_up)()
    }

    fn out_of_time(&self) -> PlannerError {
        PlannerError::OutOfTime { layouts: self.search.layouts, out_of_memory: self.search.out_of_memory }
    }

    /// Lists and counts the layouts, by families, with what their arithmetic alone says of each.
    fn open_space(&mut self) {
        let families = with_placed_operators(self.request, self.bounds.space.families());
        let space = &self.bounds.space;
        let of_family = |(number, family): (usize, Family)| {
            let members = space.members(&family).len();
            let (alike, forms) = (space.alike(&family, members), self.bounds.forms(&family.layout));
            let bound = self.bounds.of_arithmetic(&family);
            (Open { bound, index: (number, 0), what: What::Unbounded(Box::new(family)) }, members, alike, forms)
        };
        let opened: Vec<_> = families.into_par_iter().enumerate().map(of_family).collect();
        for (open, members, alike, forms) in opened {
            self.search.layouts += (members + alike) * forms;
            self.resident += members + alike;
            self.search.alike += alike * forms;
            self.heap.push(Reverse(open));
        }
    }

    /// Bounds the families of which their arithmetic says the least: no layout of any other takes less than that.
    fn bound_families(&mut self) -> Result<(), PlannerError> {
        let mut families = Vec::new();
        while families.len() < FAMILIES_BOUNDED_AT_ONCE
            && let Some(Reverse(next)) = self.heap.peek()
            && matches!(next.what, What::Unbounded(_))
            && let Some(Reverse(Open { bound, index, what: What::Unbounded(family) })) = self.heap.pop()
        {
            families.push((bound, index.0, family));
        }
        // Those that were not looked at are left out.
        let bounded = families.into_par_iter().map(|(of_arithmetic, number, family)| {
            if self.may_give_up() {
                return None;
            }
            let verdict = self.bounds.of_family(&family);
            let on_hosts = match verdict {
                Verdict::OutOfMemory(needed) => self.family_on_hosts(&family, needed),
                _ => Vec::new(),
            };
            let members = self.bounds.space.members(&family).len();
            Some((of_arithmetic, number, *family, members, verdict, on_hosts))
        });
        let bounded: Vec<_> = bounded.collect();
        let is_given_up = bounded.iter().any(Option::is_none);
        for (of_arithmetic, number, family, members, verdict, on_hosts) in bounded.into_iter().flatten() {
            for (verdict, family) in std::iter::once((verdict, family)).chain(on_hosts) {
                if let Some(bound) = self.admit((number, None), verdict, &family.layout, members) {
                    let (bound, what) = (bound.max(of_arithmetic), What::Family(Box::new(family)));
                    self.heap.push(Reverse(Open { bound, index: (number, 0), what }));
                }
            }
        }
        if is_given_up { Err(self.out_of_time()) } else { Ok(()) }
    }

    /// The bound of what may be worth looking at; what is not is counted.
    fn judge(&mut self, verdict: Verdict, layouts: usize) -> Option<f64> {
        match verdict {
            Verdict::Least(bound) => return Some(bound),
            Verdict::Indivisible(reason) => {
                self.search.indivisible += layouts;
                self.reason.get_or_insert(reason);
            }
            Verdict::OutOfMemory(bytes) => {
                self.search.out_of_memory += layouts;
                self.least = Some(self.least.map_or(bytes, |least| least.min(bytes)));
            }
            Verdict::OutOfHostMemory => self.search.out_of_memory += layouts,
        }
        None
    }

    /// Bounds the members of the families whose bounds are least.
    fn open_families(&mut self) {
        let mut opened = Vec::new();
        while opened.len() < FAMILIES_AT_ONCE
            && let Some(Reverse(next)) = self.heap.peek()
            && matches!(next.what, What::Family(_))
            && let Some(Reverse(Open { bound, index, what: What::Family(family) })) = self.heap.pop()
        {
            let members = self.bounds.members(&family).into_iter().enumerate();
            opened.extend(members.map(|(member, layout)| (bound, (index.0, member), layout, family.micro_batches)));
        }
        let bounded = opened.into_par_iter().map(|(of_family, index, layout, micro_batches)| {
            let (verdict, layout) = self.bounds.of_fitted(layout, micro_batches);
            let on_hosts = match verdict {
                Verdict::OutOfMemory(needed) if layout.offload.is_none() => self.layout_on_hosts(&layout, micro_batches, needed),
                _ => Vec::new(),
            };
            (of_family, index, layout, micro_batches, verdict, on_hosts)
        });
        let bounded: Vec<_> = bounded.collect();
        let mut members = Vec::new();
        for (of_family, index, layout, micro_batches, verdict, on_hosts) in bounded {
            let does_not_fit = matches!(verdict, Verdict::OutOfMemory(_));
            members.extend(self.member(verdict, index, of_family, layout.clone()));
            for (verdict, layout) in on_hosts {
                members.extend(self.member(verdict, index, of_family, layout));
            }
            if does_not_fit && let Some(both) = self.with_both(index, &layout) {
                members.extend(self.member(self.bounds.of_member(&both, micro_batches), index, of_family, both));
            }
        }
        self.push_members(members);
    }

    /// Keeps layouts until their turn comes, those together that one Program tells of.
    fn push_members(&mut self, members: Vec<Member>) {
        self.heap.extend(in_groups(members).into_iter().map(Reverse));
    }

    /// The layouts that are to be simulated together: those whose bounds are least. Families that may have one of them are opened for that, as far as it
    /// would hardly be settled without.
    fn next_round(&mut self) -> Result<Vec<Vec<Member>>, PlannerError> {
        let mut round: Vec<Vec<Member>> = Vec::new();
        let most = if self.kept.is_empty() { FIRST_SIMULATIONS } else { SIMULATIONS_AT_ONCE };
        let mut least = f64::INFINITY;
        while round.len() < most
            && let Some(Reverse(next)) = self.heap.peek()
            && !self.is_settled(next.bound)
        {
            least = least.min(next.bound);
            match next.what {
                What::Unbounded(_) if self.may_be_near(next.bound, least) => self.bound_families()?,
                What::Family(_) if self.may_be_near(next.bound, least) => self.open_families(),
                What::Unbounded(_) | What::Family(_) => break,
                What::Members(_) => {
                    if let Some(Reverse(Open { what: What::Members(members), .. })) = self.heap.pop() {
                        round.push(members);
                    }
                }
            }
        }
        Ok(round)
    }

    /// Whether something with a bound may be looked at together with the first of a round.
    fn may_be_near(&self, bound: f64, least: f64) -> bool {
        bound * (1.0 + self.request.tolerance) <= NEAR * least
    }

    /// Has the simulator decide among the members whose bounds are least.
    fn simulate_members(&mut self) -> Result<(), PlannerError> {
        let round = self.next_round()?;
        let begun = round.par_iter().map(|members| self.begin(members)).collect::<Result<Vec<Begun>, PlannerError>>()?;
        let best = begun.iter().filter_map(|one| value_of(one.fate.as_ref()?)).reduce(f64::min);
        let fates: Vec<Vec<Fate>> = round
            .par_iter()
            .zip(begun)
            .map(|(members, begun)| self.go_on(members, begun, best))
            .collect::<Result<_, PlannerError>>()?;
        for (members, fates) in round.into_iter().zip(fates) {
            let mut members = members.into_iter();
            let mut left: Vec<Member> = Vec::new();
            for (Member { bound, index, layout, .. }, fate) in
                members.by_ref().take(fates.len()).collect::<Vec<_>>().into_iter().zip(fates)
            {
                let place = (index.0, Some(index.1));
                match fate {
                    Fate::Indivisible(reason) => drop(self.admit(place, Verdict::Indivisible(reason), &layout, 1)),
                    Fate::OutOfMemory(held) => self.does_not_fit(index, bound, &layout, &held),
                    Fate::OutOfHostMemory => drop(self.admit(place, Verdict::OutOfHostMemory, &layout, 1)),
                    // As what was not looked at, with a better bound.
                    Fate::Beaten(at_least) => left.push(Member { bound: at_least.max(bound), index, layout, is_stopped: true }),
                    Fate::Simulated(kept) => {
                        self.count_simulated(index, &layout);
                        self.kept.push(*kept);
                    }
                }
            }
            left.extend(members);
            self.push_members(left);
        }
        self.kept.sort_by(|a, b| a.value.total_cmp(&b.value).then(a.index.cmp(&b.index)));
        Ok(())
    }

    /// Compiles layouts that one Program tells of, and simulates the first, if it fits.
    /// What evaluation needs is looked at for those that would be returned only: it is hardly ever more than training does.
    fn begin(&self, members: &[Member]) -> Result<Begun, PlannerError> {
        let Some(first) = members.first() else { return Ok(Begun { program: None, fate: None }) };
        let plan = self.plan_of(first);
        match self.bounds.compiler.training(&plan) {
            Ok(program) => {
                let fate = self.fate(first, plan, &program, None)?;
                Ok(Begun { program: Some(program).filter(|_| members.len() > 1), fate: Some(fate) })
            }
            Err(error) => Ok(Begun { program: None, fate: Some(Fate::Indivisible(error.to_string())) }),
        }
    }

    /// Simulates as many of the other layouts that one Program tells of as are left to be looked at when the first ones of the round have been, of
    /// which this is the best.
    fn go_on(&self, members: &[Member], begun: Begun, mut best: Option<f64>) -> Result<Vec<Fate>, PlannerError> {
        let Begun { program, fate } = begun;
        let mut fates: Vec<Fate> = fate.into_iter().collect();
        let (Some(mut program), Some(first)) = (program, members.first()) else { return Ok(fates) };
        for member in &members[1..] {
            let is_beaten = |best: f64| self.request.top <= 1 && self.is_beaten(member.bound, best, best);
            let is_far = member.bound > NEAR * first.bound || self.is_settled(member.bound) || best.is_some_and(is_beaten);
            if is_far && fates.iter().any(|fate| matches!(fate, Fate::Simulated(_) | Fate::Beaten(_))) {
                break;
            }
            let plan = self.plan_of(member);
            if !plan.mesh().is_ok_and(|mesh| program.lay_out(mesh)) {
                break;
            }
            let fate = self.fate(member, plan, &program, best)?;
            best = best.into_iter().chain(value_of(&fate)).reduce(f64::min);
            fates.push(fate);
        }
        Ok(fates)
    }

    fn plan_of(&self, member: &Member) -> Plan {
        Plan { layout: member.layout.clone(), ..self.request.base.clone() }
    }

    /// Until when a layout's simulation is worth going on, where the best of those that were simulated beside the incumbents is this. One that may be
    /// returned beside the best is simulated to its end, and so is one that was stopped once and is asked for again.
    fn deadline(&self, member: &Member, program: &Program, best: Option<f64>) -> Option<Deadline> {
        let kept = self.kept.first().map(|kept| kept.value);
        let best = best.into_iter().chain(kept).chain(self.request.elsewhere).reduce(f64::min)?;
        if self.request.top > 1 || member.is_stopped {
            return None;
        }
        let enough = if self.resident < SMALL { best } else { best / (1.0 + self.request.tolerance) };
        self.bounds.deadline(&member.layout, program, Seconds::new(enough / self.bounds.weight(&member.layout)))
    }

    /// What becomes of a layout whose Program this is: it is simulated, if it fits, to its end if it may be the best.
    fn fate(&self, member: &Member, plan: Plan, program: &Program, best: Option<f64>) -> Result<Fate, PlannerError> {
        let request = self.request;
        let (memory, by_component) = self.memory_of(program);
        let weights = self.bounds.devices.weights_of_stages(program);
        let held = weighed(&memory, &weights);
        if most(&held) > self.bounds.memory_limit {
            return Ok(Fate::OutOfMemory(held));
        }
        if !host_memory(program, request.topology).fits {
            return Ok(Fate::OutOfHostMemory);
        }
        let weight = self.bounds.weight(&plan.layout);
        let (value, foretold) = match request.objective {
            // One run says all.
            Objective::Time | Objective::Cost | Objective::Goodput if request.costs.step_spread.is_some() => {
                let deadline = self.deadline(member, program, best).map(Arc::new);
                let prediction = match self.prediction(program, deadline) {
                    Err(SimulationError::PastDeadline { at_least }) => {
                        return Ok(Fate::Beaten(Seconds::from(at_least).value() * weight));
                    }
                    prediction => prediction?,
                };
                let value = prediction.step_seconds.value() * weight;
                (value, Some(Foretold { prediction, memory, by_component, weights }))
            }
            objective => (objective.value(request, program, weight)?, None),
        };
        Ok(Fate::Simulated(Box::new(Kept { value, index: member.index, plan, foretold })))
    }

    /// What the fullest device of each stage holds: our executor the arena, another framework what its profile says, by component.
    fn memory_of(&self, program: &Program) -> (Vec<Bytes>, Vec<Footprint>) {
        let request = self.request;
        if request.base.stack.is_own() {
            return (self.arenas(program), Vec::new());
        }
        let by_component = device_memory_by_stage(program, request.topology, request.costs);
        (by_component.iter().map(Footprint::total).collect(), by_component)
    }

    /// What is said of a layout of which a simulation has only told the value.
    fn foretell(&self, plan: &Plan) -> Result<Foretold, PlannerError> {
        // It was compiled once, so that it will be again.
        let again = self.bounds.compiler.training(plan);
        let program = again.map_err(|error| no_layout(self.request, error.to_string(), USUAL_MEND))?;
        let (memory, by_component) = self.memory_of(&program);
        let weights = self.bounds.devices.weights_of_stages(&program);
        Ok(Foretold { prediction: self.prediction(&program, None)?, memory, by_component, weights })
    }

    /// What our executor needs of the devices of each stage: where a processor's memory is the host's, what is there, too.
    fn arenas(&self, program: &Program) -> Vec<Bytes> {
        let is_one = self.request.topology.device_kinds().iter().any(|kind| kind.architecture == Architecture::Cpu);
        let both = program.arenas().into_iter().zip(program.host_arenas());
        both.map(|(device, host)| if is_one { device + host } else { device }).collect()
    }

    /// The places of what would be returned: the best, and then the best of other kinds, as long as there are any.
    fn returned(&self) -> Vec<usize> {
        let top = self.request.top.max(1);
        let kind = |kept: &Kept| {
            let Layout { data, tensor, pipeline, context, expert, zero, ref recompute, offload, .. } = kept.plan.layout;
            // However many blocks.
            let is_of_some = matches!(recompute, Recompute::FullLayers(_) | Recompute::FullLayersOfStages(_));
            let recompute = if is_of_some { Recompute::FullLayers(0) } else { recompute.clone() };
            (data, tensor, pipeline, context, expert, zero == 3, recompute, offload)
        };
        // What takes as long to the picosecond, and differs in what is computed again alone, computes nothing again that it does not.
        let is_like = |one: &Kept, other: &Kept| {
            let alone = |kept: &Kept| Layout { recompute: Recompute::None, ..kept.plan.layout.clone() };
            one.value.total_cmp(&other.value).is_eq() && alone(one) == alone(other)
        };
        let mut different: Vec<usize> = Vec::new();
        for (place, kept) in self.kept.iter().enumerate() {
            if !different.iter().any(|&other| is_like(&self.kept[other], kept)) {
                different.push(place);
            }
        }
        let mut places: Vec<usize> = Vec::new();
        for &place in &different {
            if places.len() < top && places.iter().all(|&other| kind(&self.kept[other]) != kind(&self.kept[place])) {
                places.push(place);
            }
        }
        different.retain(|place| !places.contains(place));
        places.extend(different.into_iter().take(top - places.len()));
        places.sort_unstable();
        places
    }

    /// Compiles the evaluation of what would be returned; what that makes too large is forgotten, and there is nothing then.
    fn with_evaluation(&mut self) -> Result<Option<Vec<Foretold>>, PlannerError> {
        let places = self.returned();
        let known: Vec<Option<Foretold>> = places.iter().map(|&place| self.kept[place].foretold.take()).collect();
        let plans: Vec<&Plan> = places.iter().map(|&place| &self.kept[place].plan).collect();
        let all = plans.par_iter().zip(known).map(|(plan, known)| {
            let mut foretold = known.map_or_else(|| self.foretell(plan), Ok)?;
            if self.request.base.stack.is_own() {
                // Evaluation shares the arena.
                let evaluation = self.bounds.compiler.evaluation(plan);
                let evaluation = evaluation.map_err(|error| no_layout(self.request, error.to_string(), USUAL_MEND))?;
                foretold.memory =
                    foretold.memory.into_iter().zip(self.arenas(&evaluation)).map(|(one, other)| one.max(other)).collect();
            }
            Ok(foretold)
        });
        let all = all.collect::<Result<Vec<Foretold>, PlannerError>>()?;
        let held = all.iter().map(|one| weighed(&one.memory, &one.weights));
        let misfit = held.enumerate().find(|(_, held)| most(held) > self.bounds.memory_limit);
        let Some((place, held)) = misfit else { return Ok(Some(all)) };
        places.iter().zip(all).for_each(|(&place, foretold)| self.kept[place].foretold = Some(foretold));
        let misfit = self.kept.remove(places[place]);
        let (index, layout) = (misfit.index, &misfit.plan.layout);
        self.uncount_simulated(index, layout);
        self.does_not_fit(index, 0.0, layout, &held);
        Ok(None)
    }

    fn prediction(&self, training: &Program, deadline: Option<Arc<Deadline>>) -> Result<Prediction, SimulationError> {
        let Request { topology, costs, oversubscription, .. } = *self.request;
        let options =
            Options { oversubscription, recording: Recording::Ends, folding: Folding::On, deadline, ..Options::default() };
        Ok(predict_with(training, topology, costs, &options)?.0)
    }

    fn answer(mut self, foretold: Vec<Foretold>, left: Option<f64>) -> Planned {
        let kept = self.kept.first().map(|kept| kept.value);
        let best = kept.into_iter().chain(self.request.elsewhere).fold(f64::INFINITY, f64::min);
        let plans: Vec<&Plan> = self.returned().into_iter().map(|place| &self.kept[place].plan).collect();
        let candidate = |(plan, Foretold { mut prediction, memory, by_component, .. }): (&Plan, Foretold)| {
            prediction.peak_memory_bytes = memory;
            if !by_component.is_empty() {
                (prediction.memory_by_component, prediction.fits) = (by_component, true);
            }
            let mut plan = plan.clone();
            if matches!(&plan.layout.recompute, Recompute::FullLayersOfStages(layers) if layers.iter().all(|&layers| layers == 0))
            {
                plan.layout.recompute = Recompute::None;
            }
            Candidate { plan, prediction }
        };
        let candidates: Vec<Candidate> = plans.into_iter().zip(foretold).map(candidate).collect();
        // Where there is nothing better it is what was found elsewhere, which is of time where searches are put together by time.
        self.search.best_seconds = candidates.first().map_or(best, |best| best.prediction.step_seconds.value());
        // The value of what is left, in terms of the best one's time.
        let share = left.map_or(1.0, |left| (left / best).min(1.0));
        self.search.lower_bound_seconds = self.search.best_seconds * share;
        self.search.gap = if share > 0.0 { 1.0 / share - 1.0 } else { f64::INFINITY };
        Planned { candidates, value: best, search: self.search }
    }
}

/// What stages hold, each weighed.
fn weighed(held: &[Bytes], weights: &[f64]) -> Vec<f64> {
    held.iter().zip(weights).map(|(bytes, weight)| bytes.value() * weight).collect()
}

/// The most of that.
fn most(held: &[f64]) -> Bytes {
    Bytes::new(held.iter().copied().fold(0.0, f64::max).ceil() as u64)
}

/// Seconds of picoseconds.
pub(crate) fn seconds(picoseconds: f64) -> Seconds {
    Seconds::new(picoseconds * 1e-12)
}
