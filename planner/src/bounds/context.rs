//! Everything that the bounds of one request's layouts share.

use super::arithmetic::Arithmetic;
use super::bound::{Bound, ROUNDING, seconds};
use super::hosts::Hosts;
use super::kernel_work::KernelWork;
use super::memo::Memo;
use super::pipeline::{BUCKET_ROUNDING, PipelineCuts, PipelineTables};
use super::replicas::Replicas;
use super::truncated::TruncatedModels;
use crate::error::PlannerError;
use crate::estimate::Estimates;
use crate::objective;
use crate::space::{DeviceKinds, Objective, Request, Space, optimizer_tensors, world_size};
use foretell_models::GraphOptions;
use foretell_program::{Compiler, Layout};
use foretell_simulator::gpu::StateKind;
use foretell_simulator::{MemoryRates, Quantile};
use foretell_units::{Bytes, Seconds};
use std::sync::Arc;

/// The bounds of one request's layouts, and what they are computed from.
pub(crate) struct Bounds<'a> {
    pub(crate) request: &'a Request<'a>,
    pub(crate) space: Space<'a>,
    pub(crate) kinds: Arc<DeviceKinds>,
    /// Memory limit in weighted bytes: the smallest limit of any device.
    pub(crate) memory_limit: Bytes,
    /// Least memory for each byte of a Program's buffers, under the request's software stack.
    pub(super) memory_rates: MemoryRates,
    /// Estimates, for the order in which layouts are tried.
    pub(crate) estimates: Estimates,
    /// Compiler of the whole model.
    pub(crate) compiler: Compiler<'a>,
    /// The number of parameters of the model.
    pub(super) parameters: usize,
    /// The number of parameters that are trained.
    pub(super) trained: usize,
    pub(super) truncated: TruncatedModels<'a>,
    pub(super) replicas: Replicas,
    pub(super) pipelines: PipelineTables,
    pub(super) hosts: Hosts,
    pub(super) arithmetic: Arithmetic,
    /// Its bound is zero until [`count_kernels`](Self::count_kernels) is called.
    kernel_work: KernelWork,
    /// Time that the fastest device adds to a step outside the instructions.
    step_overhead: Seconds,
    /// Time that the fastest device adds to each micro-batch outside the instructions.
    micro_batch_overhead: Seconds,
    /// By number of ranks, the value of a second of step time; see [`objective::value_per_second`].
    values_per_second: Memo<usize, f64>,
    /// Cuts that minimise time, keyed by a layout without ZeRO and the number of micro-batches.
    /// `None` if no cuts are found.
    pub(super) cuts_by_time: Memo<(Layout, usize), Option<Vec<usize>>>,
}

impl<'a> Bounds<'a> {
    /// Prepares the bounds of a request.
    ///
    /// # Errors
    /// [`PlannerError`] if the model's sizes contradict each other, if adapters match no layer, or
    /// if a step has no samples.
    pub(crate) fn new(request: &'a Request<'a>) -> Result<Self, PlannerError> {
        let graph = request.base.training.graph(request.model, request.name, &GraphOptions::ONE);
        let graph = graph.map_err(|error| PlannerError::of_plan(request, error))?;
        let (topology, costs) = (request.topology, request.costs);
        let kinds = Arc::new(DeviceKinds::new(topology, request.devices, request.memory_limit, request.headroom));
        let space = Space::new(request, &graph, &kinds);
        if space.global_batch == 0 {
            return Err(PlannerError::no_layout(request, "there are no samples".into(), "use a global batch of at least 1"));
        }
        let rates = kinds.kinds.iter().map(|&kind| costs.memory_rates(kind, StateKind::of_plan(request.base)));
        let memory_rates = rates.reduce(MemoryRates::least).unwrap_or(MemoryRates::ARENA);
        let all_kinds = 0..topology.device_kinds().len();
        let least = |time: &dyn Fn(usize) -> Seconds| {
            all_kinds.clone().map(time).reduce(Seconds::min).expect("invariant: a topology has a kind of device")
        };
        Ok(Self {
            request,
            memory_limit: kinds.smallest_memory_limit(),
            memory_rates,
            estimates: Estimates::new(
                request,
                &graph,
                memory_rates,
                optimizer_tensors(request.base),
                space.model.is_plain_stack(),
                &space.devices.speeds,
            ),
            compiler: Compiler::new(request.model, request.name),
            parameters: graph.parameter_count(),
            trained: objective::trained_parameters(request.base, &graph),
            truncated: TruncatedModels::new(request, Arc::clone(&kinds), memory_rates, (&space.model, &graph)),
            replicas: Replicas::new(),
            pipelines: PipelineTables::new(),
            hosts: Hosts::new(request, &kinds, &memory_rates),
            arithmetic: Arithmetic::new(request, &graph, &kinds.kinds),
            kernel_work: KernelWork::default(),
            step_overhead: least(&|kind| costs.parameters(kind).step_overhead.at(Quantile::Median)),
            micro_batch_overhead: least(&|kind| costs.parameters(kind).micro_batch_overhead),
            values_per_second: Memo::new(),
            cuts_by_time: Memo::new(),
            space,
            kinds,
        })
    }

    /// Returns the bound of a layout whose instructions take at least `picoseconds` and whose
    /// fullest stage holds at least `bytes` weighted bytes.
    pub(super) fn bound(&self, micro_batches: usize, picoseconds: f64, bytes: f64) -> Bound {
        let memory = self.needed_memory(bytes);
        if memory > self.memory_limit {
            return Bound::too_large(memory);
        }
        let time = seconds(picoseconds * ROUNDING) + self.step_overhead + self.micro_batch_overhead * micro_batches as f64;
        Bound { time: Some(time), memory }
    }

    /// Returns the time that a step takes at least outside its instructions.
    pub(super) fn overhead(&self, micro_batches: usize) -> Seconds {
        self.step_overhead + self.micro_batch_overhead * micro_batches as f64
    }

    /// Returns the least memory that a device needs if its buffers take `bytes` weighted bytes,
    /// with the stack's fixed memory.
    pub(super) fn needed_memory(&self, bytes: f64) -> Bytes {
        Bytes::new((bytes + self.fixed_memory() - BUCKET_ROUNDING).max(0.0) as u64)
    }

    /// Returns the weighted bytes that the software stack holds for any Program, at least.
    pub(super) fn fixed_memory(&self) -> f64 {
        self.memory_rates.fixed.value() * self.kinds.weight_of(None)
    }

    /// Returns the value, in the request's objective, of a second of a layout's step time. No
    /// layout has a smaller value than its time times this.
    pub(crate) fn value_per_second(&self, layout: &Layout) -> f64 {
        let ranks = world_size(layout);
        self.values_per_second.get(ranks, || objective::value_per_second(self.request, ranks))
    }

    /// Counts the kernels of a step, for the bounds on every layout. That compiles the model once.
    pub(crate) fn count_kernels(&mut self) {
        self.kernel_work = KernelWork::new(self.request, &self.compiler, &self.kinds);
    }

    /// Lower bound on the step time of layouts with this mesh and micro-batch, from kernels alone.
    pub(crate) fn arithmetic_time(&self, layout: &Layout) -> Seconds {
        let products = self.arithmetic.least_time(layout, self.space.global_batch);
        products.max(self.kernel_work.least_time_on(world_size(layout)))
    }

    /// Returns a lower bound on the step time of every layout: its kernels, divided over all
    /// devices.
    pub(crate) fn least_step(&self) -> Seconds {
        let products = self.arithmetic.least_time_on(self.request.devices, self.space.global_batch);
        products.max(self.kernel_work.least_time_on(self.request.devices)) + self.overhead(1)
    }

    /// Returns a lower bound on the value of every layout. Zero for objectives in which the value
    /// of a second depends on the devices in use.
    pub(crate) fn least_value(&self) -> f64 {
        match self.request.objective {
            Objective::Time | Objective::SlowEnd => self.least_step().value(),
            Objective::Cost | Objective::Energy | Objective::Goodput => 0.0,
        }
    }

    /// Returns `true` if truncated models bound a layout, so that a bound costs far less than a
    /// simulation. It returns `false` for models of a repeating pattern, whose bounds cost much of
    /// a simulation and are weaker on memory.
    pub(crate) fn has_cheap_bounds(&self, layout: &Layout) -> bool {
        self.space.model.is_plain_stack() && self.truncated.represent(layout) && self.truncated.represent_all_ranks(layout)
    }

    /// Returns the cuts of a layout that truncated models represent, with the blocks that it
    /// recomputes.
    pub(super) fn cuts(&self, layout: &Layout) -> Arc<PipelineCuts> {
        let pattern = self.space.model.pattern.as_ref().expect("invariant: truncated models represent the layout");
        self.pipelines.cuts(layout, &self.space.model.work, pattern)
    }
}
