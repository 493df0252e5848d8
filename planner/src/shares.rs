//! Bounds of layouts whose ranks of `data` have unequal shares of the samples.

use crate::bounds::{Bounds, Verdict, inner_ranks};
use crate::pipeline::{Pieces, Update};
use crate::probe::Probe;
use foretell_program::Layout;
use std::sync::Arc;

impl Bounds<'_> {
    /// Of all members of a family without a pipeline whose ranks of `data` have unequal shares: the most that any of them takes by itself.
    pub(crate) fn of_shares(&self, layout: &Layout, shares: &[usize], micro_batches: usize) -> Verdict {
        if layout.pipeline != 1 {
            return Verdict::Least(0.0);
        }
        let inner = inner_ranks(layout);
        let mut different: Vec<(usize, Option<usize>)> = Vec::new();
        for (data, &share) in shares.iter().enumerate() {
            let one = (share, self.devices.kind_of(data * inner).filter(|&kind| self.request.costs.knows_collectives(kind)));
            if !different.contains(&one) {
                different.push(one);
            }
        }
        let single = Layout { data: 1, shares: None, zero: 0, shard_group: None, micro_batch: 1, ..layout.clone() };
        // Optimizer state may be shared out.
        let held = |probe: Arc<Probe>, samples: usize, kind: Option<usize>| {
            let (cutting, in_flight) = (self.cutting(&single), self.in_flight(&single, micro_batches));
            let weights = [self.devices.weight_of(kind)];
            let paces = [self.offloading.pace_of(&self.devices, kind)];
            let pieces = Pieces::new(&[probe], &[0], &weights, &cutting, layout.schedule, layout.virtual_stages);
            let pieces = pieces.offloading(self.offloading.of(layout, &paces, layout.data));
            pieces.least_memory(&in_flight, 1, |_| layout.data, samples as f64)
        };
        // That does not depend on how many samples there are.
        let has_probe = self.has_probe(&single);
        let (mut time, mut memory) = (0.0f64, 0.0f64);
        for (share, kind) in different {
            let samples = layout.micro_batch * share;
            // As of other families, one sample says enough of most that are too large.
            if has_probe
                && self.space.experts.is_none()
                && let Ok(probe) = self.probe(&single, micro_batches.min(2), kind)
            {
                let needed = self.needed(held(probe, samples, kind));
                if needed > self.memory_limit {
                    return Verdict::OutOfMemory(needed);
                }
            }
            let alone = Layout { micro_batch: samples, ..single.clone() };
            if !has_probe {
                match self.kernels_of(&alone, kind) {
                    Ok(kernels) => time = time.max(kernels * micro_batches as f64),
                    Err(verdict) => return verdict,
                }
                continue;
            }
            let probe = match self.probe(&alone, micro_batches.min(2), kind) {
                Ok(probe) => probe,
                Err(reason) => return Verdict::Indivisible(reason),
            };
            let (cutting, probes) = (self.cutting(&alone), [Arc::clone(&probe)]);
            let pieces = Pieces::new(&probes, &[0], &[1.0], &cutting, alone.schedule, alone.virtual_stages);
            time = time.max(pieces.least_time(micro_batches, Update::LeftOut));
            memory = memory.max(held(probe, 1, kind));
        }
        self.verdict(layout, micro_batches, time, memory)
    }
}
