//! Offloaded optimizer state: only the update of a bucket needs its state on the device.
//!
//! The device has staging buffers for the states of a few buckets. While one bucket is updated, the
//! state of the next is copied in and that of the previous one out, each direction on its own
//! stream. This module adds no waits: the dependency pass derives them from the reads and writes of
//! staging buffers.

use super::list::{Label, ListBuilder};
use super::persistent::{BucketBuffers, PersistentBuffers};
use crate::program::{BufferId, BufferRole, MemoryKind, Phase};
use foretell_units::DataType;

/// The number of staging buffers: one bucket comes in, one is updated, one goes out.
const STAGING_BUFFERS: usize = 3;

/// The staging buffers of offloaded optimizer states. Buckets use them in turn.
pub(super) struct StagedStates {
    /// The number of buckets that have states.
    trained: usize,
    staging: Vec<BufferId>,
    /// By bucket: the device's copy of each of its states, for the buckets whose copies have begun.
    on_device: Vec<Vec<BufferId>>,
}

impl StagedStates {
    /// Adds staging buffers, each as large as the largest bucket that uses it, and begins to copy
    /// in the states of the first buckets. `None` if no state is on the host.
    pub(super) fn new(list: &mut ListBuilder, persistent: &PersistentBuffers) -> Option<Self> {
        // Frozen buckets, which have no states, come last.
        let trained = persistent.buckets.iter().take_while(|bucket| !bucket.states.is_empty()).count();
        let buckets = &persistent.buckets[..trained];
        let is_offloaded = |state: &BufferId| list.buffer(*state).memory == MemoryKind::Host;
        if !buckets.iter().flat_map(|bucket| &bucket.states).any(is_offloaded) {
            return None;
        }
        let elements = |bucket: &BucketBuffers| bucket.states.iter().map(|&state| list.elements(state)).sum::<usize>();
        let largest = |turn: usize| buckets.iter().skip(turn).step_by(STAGING_BUFFERS).map(elements).max().unwrap_or(0);
        let sizes: Vec<usize> = (0..STAGING_BUFFERS.min(buckets.len())).map(largest).collect();
        let staging: Vec<BufferId> = sizes
            .into_iter()
            .map(|size| list.add_buffer("optimizer state", BufferRole::OptimizerState, vec![size], DataType::Fp32))
            .collect();
        let mut staged = Self { trained, staging, on_device: Vec::new() };
        for bucket in 0..staged.staging.len() {
            staged.bring_in(list, persistent, bucket);
        }
        Some(staged)
    }

    /// The device's copies of a bucket's states.
    pub(super) fn of_bucket(&self, bucket: usize) -> &[BufferId] {
        &self.on_device[bucket]
    }

    /// After a bucket's update: copies its states to the host, and copies in those of the bucket
    /// that uses the staging buffer next.
    pub(super) fn take_out(&mut self, list: &mut ListBuilder, persistent: &PersistentBuffers, bucket: usize) {
        let name = format!("optimizer state {bucket}");
        for (&device, &host) in self.on_device[bucket].iter().zip(&persistent.buckets[bucket].states) {
            list.copy(Label::of_step(&name, Phase::Update), device, host);
        }
        let next = bucket + self.staging.len();
        if next < self.trained {
            self.bring_in(list, persistent, next);
        }
    }

    fn bring_in(&mut self, list: &mut ListBuilder, persistent: &PersistentBuffers, bucket: usize) {
        let staging = self.staging[bucket % self.staging.len()];
        let name = format!("optimizer state {bucket}");
        let mut copies = Vec::new();
        let mut offset = 0;
        for &state in &persistent.buckets[bucket].states {
            let elements = list.elements(state);
            let copy = list.add_view(&name, staging, offset, vec![elements]);
            list.copy(Label::of_step(&name, Phase::Update), state, copy);
            copies.push(copy);
            offset += elements;
        }
        self.on_device.push(copies);
    }
}
