//! The step of a parameter server.
//!
//! A step begins with the pull: servers send every bucket's parameters, in the order in which the
//! forward pass reads them. A server adds the pushes of a bucket in the order of the workers, so
//! that the sum has the same bits in every run. It updates a bucket while the pushes of the next
//! ones arrive. Where workers are not synchronised, a server has a session for each of them.

use super::StageEmitter;
use super::list::{Label, ListBuilder};
use super::persistent::PersistentBuffers;
use super::push::Push;
use super::update::Update;
use super::workers::{in_forward_order, peer, peers};
use crate::compile::wanted::{SessionPart, Wanted};
use crate::plan::Plan;
use crate::program::{BufferRole, PeerId, Phase};
use foretell_models::Kernel;
use foretell_units::DataType;

impl StageEmitter<'_> {
    /// Emits the instructions of a server in a Program.
    pub(in crate::compile) fn serve(&mut self, wanted: Wanted, pushed: &[usize]) {
        let Self { stage, list, persistent, gradients, .. } = self;
        let of_workers = stage.index - stage.cuts.stages;
        if stage.plan.pacing().is_some() {
            let workers = match wanted {
                Wanted::Serve(worker, _) => worker..worker + 1,
                Wanted::Step(_) | Wanted::Evaluation | Wanted::Logits => 0..stage.plan.layout.data,
            };
            let workers: Vec<_> = workers.map(|worker| (worker, peer(list, stage, of_workers, worker))).collect();
            self.sessions(&workers, wanted, pushed);
            return;
        }
        let workers = peers(list, stage, of_workers, stage.plan.layout.data);
        if wanted == Wanted::Logits {
            return;
        }
        for bucket in in_forward_order(stage) {
            for &worker in &workers {
                let label = format!("parameters {bucket}");
                list.send(Label::of_step(&label, Phase::Forward), worker, persistent.buckets[bucket].parameters);
            }
        }
        if matches!(wanted, Wanted::Step(_)) {
            gradients.take_whole(persistent);
            let mut update = Update { list, stage, persistent, gradients, exchange: None };
            for &bucket in pushed {
                sum_pushes(update.list, persistent, Push::of(stage.plan), bucket, &workers);
                update.run_early(bucket);
            }
            update.run_late();
        }
    }
}

impl StageEmitter<'_> {
    /// Emits the parts of the workers' sessions that a Program needs.
    fn sessions(&mut self, workers: &[(usize, PeerId)], wanted: Wanted, pushed: &[usize]) {
        let adds = adds_pushes(self.stage.plan);
        let of_all = |parts: &[SessionPart]| {
            let of_part = |&part: &SessionPart| workers.iter().map(move |&worker| (worker, part));
            parts.iter().flat_map(of_part).collect::<Vec<_>>()
        };
        let parts = match wanted {
            Wanted::Serve(_, part) => of_all(&[part]),
            Wanted::Step(_) if adds => {
                let mut parts = of_all(&SessionPart::ALL[..4]);
                // One update for all pushes.
                parts.extend(workers.last().map(|&last| (last, SessionPart::Update)));
                parts
            }
            Wanted::Step(_) => of_all(&SessionPart::ALL),
            Wanted::Evaluation => of_all(&[SessionPart::Snapshot, SessionPart::Send]),
            Wanted::Logits => Vec::new(),
        };
        for (worker, part) in parts {
            self.session(worker, part, pushed);
        }
    }

    /// Emits a part of a server's session for one worker.
    fn session(&mut self, (worker, peer): (usize, PeerId), part: SessionPart, pushed: &[usize]) {
        let Self { stage, list, persistent, gradients, .. } = self;
        let buffers = |bucket: usize| persistent.buckets[bucket].sessions.get(worker).copied();
        match part {
            SessionPart::Snapshot => {
                for bucket in in_forward_order(stage) {
                    let Some([copy, _]) = buffers(bucket) else { continue };
                    let kernel = Kernel::Slice { outer: 1, parts: 1, inner: list.elements(copy) };
                    let name = format!("parameters {bucket}");
                    list.compute(
                        Label::of_step(&name, Phase::Forward),
                        kernel,
                        &[persistent.buckets[bucket].parameters],
                        &[copy],
                    );
                }
            }
            SessionPart::Send => {
                for bucket in in_forward_order(stage) {
                    let Some([copy, _]) = buffers(bucket) else { continue };
                    list.send(Label::of_step(&format!("parameters {bucket}"), Phase::Forward), peer, copy);
                }
            }
            SessionPart::Receive => {
                for &bucket in pushed {
                    let Some([_, push]) = buffers(bucket) else { continue };
                    list.receive(Label::of_step(&format!("gradients {bucket}"), Phase::Update), peer, push);
                }
            }
            SessionPart::Add => {
                for &bucket in pushed.iter().filter(|_| adds_pushes(stage.plan)) {
                    let (Some([_, push]), Some(sum)) = (buffers(bucket), persistent.buckets[bucket].gradients) else { continue };
                    let label = format!("gradients {bucket}");
                    let kernel = Kernel::Accumulate { elements: list.elements(sum) };
                    list.compute(Label::of_step(&label, Phase::Update), kernel, &[push], &[sum]);
                }
            }
            SessionPart::Update => {
                gradients.take_session(persistent, worker);
                let mut update = Update { list, stage, persistent, gradients, exchange: None };
                for &bucket in pushed {
                    if let (Some([_, push]), Some(gradients)) = (buffers(bucket), persistent.buckets[bucket].gradients) {
                        Push::of(stage.plan).decompress(update.list, &format!("gradients {bucket}"), push, gradients);
                    }
                    update.run_session(bucket);
                    if let Some(sum) = persistent.buckets[bucket].gradients.filter(|_| adds_pushes(stage.plan)) {
                        let kernel = Kernel::Zero { elements: update.list.elements(sum) };
                        update.list.compute(Label::of_step(&format!("gradients {bucket}"), Phase::Update), kernel, &[], &[sum]);
                    }
                }
            }
        }
    }
}

/// Whether an update under unsynchronised workers waits for several pushes.
fn adds_pushes(plan: &Plan) -> bool {
    plan.pacing().is_some_and(|pacing| pacing.quorum.is_some())
}

/// Receives the gradients of a bucket from all workers, and adds them. Each push has a buffer of
/// its own, so that all may arrive at once.
fn sum_pushes(list: &mut ListBuilder, persistent: &PersistentBuffers, format: Push, bucket: usize, workers: &[PeerId]) {
    let Some(sum) = persistent.buckets[bucket].gradients else { return };
    let (name, elements) = (format!("gradients {bucket}"), list.elements(sum));
    let label = Label::of_step(&name, Phase::Update);
    let (size, data_type) = format.message(elements);
    let mut pushes = Vec::new();
    for (number, &worker) in workers.iter().enumerate() {
        // The first push is received in the sum's own buffer unless it is compressed; the other
        // pushes are added to it.
        let is_sum = number == 0 && !format.is_compressed();
        let push = if is_sum { sum } else { list.add_buffer(&name, BufferRole::Workspace, vec![size], data_type) };
        list.receive(label, worker, push);
        pushes.push(push);
    }
    for (number, push) in pushes.into_iter().enumerate() {
        let gradients = match number {
            0 => sum,
            _ if format.is_compressed() => list.add_buffer(&name, BufferRole::Workspace, vec![elements], DataType::Fp32),
            _ => push,
        };
        format.decompress(list, &name, push, gradients);
        if number > 0 {
            list.compute(label, Kernel::Accumulate { elements }, &[gradients], &[sum]);
        }
    }
}
