//! Counter-based dropout of activations and attention probabilities (as Philox; Salmon et al.
//! 2011). A hash of the element's index in the global batch decides whether it is kept. So any rank
//! can compute any part of the mask, again if need be, and no mask is stored.
//!
//! The hash: rounds of SplitMix64 (Steele et al. 2014) make a 64-bit key of the seed, the step, the
//! site (the dropout's index in the model), the sample and the upper half of the element's index,
//! once per run of elements. Two rounds of a 32-bit finaliser mix the lower half with the key; the
//! compiler vectorises them. For an attention probability, seed, step, site, sample, head and query
//! make the 64-bit key. The position of the attended key replaces the lower half of the index.

use super::memory::{Scratch, floats, floats_mut, halves, halves_mut, same};
use super::vector::multiversion;
use crate::KernelCall;
use crate::half::SixteenBits;
use foretell_models::{Attention, AttentionPlace, Dropout, DropoutSite, PositionRun, Zigzag, position_runs};

/// Most elements of a run: this many are copied, or widened to single precision, in one go.
const BLOCK: usize = 4096;

/// A run of elements of one sample whose indices have the same upper half.
#[derive(Clone, Copy)]
struct Run {
    /// Start in this rank's shard.
    start: usize,
    length: usize,
    /// Lower half of the first element's index in its sample.
    index: u32,
    key: u64,
}

/// Dropout in single precision.
///
/// # Safety
///
/// The call's operands are checked and valid; y may be x.
pub(super) unsafe fn drop_some(call: &KernelCall<'_>, sizes: &Dropout) {
    // SAFETY: reads and writes are valid; when y is x only y's slice is made.
    let y = unsafe { floats_mut(&call.writes[0]) };
    // SAFETY: as above.
    let x = (!same(&call.reads[0], &call.writes[0])).then(|| unsafe { floats(&call.reads[0]) });
    let (threshold, scale) = (sizes.site.rate.threshold(), sizes.site.rate.scale());
    for_each_run(call, sizes, BLOCK, |run| {
        let range = run.start..run.start + run.length;
        // Copying first keeps the block in the cache; the second pass then reads and writes one
        // array only.
        if let Some(x) = x {
            y[range.clone()].copy_from_slice(&x[range.clone()]);
        }
        keep_in_place(&mut y[range], run.index, run.key, threshold, scale);
    });
}

/// Dropout in half precision: each block is widened, dropped and narrowed.
///
/// # Safety
///
/// The call's operands are checked and valid; y may be x.
pub(super) unsafe fn drop_some_of_halves(call: &KernelCall<'_>, sizes: &Dropout, half: SixteenBits, scratch: &mut Scratch) {
    // SAFETY: reads and writes are valid; when y is x only y's slice is made.
    let y = unsafe { halves_mut(&call.writes[0]) };
    // SAFETY: as above.
    let x = (!same(&call.reads[0], &call.writes[0])).then(|| unsafe { halves(&call.reads[0]) });
    let (threshold, scale) = (sizes.site.rate.threshold(), sizes.site.rate.scale());
    let [memory] = scratch.pieces([BLOCK]);
    for_each_run(call, sizes, BLOCK, |run| {
        let range = run.start..run.start + run.length;
        let block = &mut memory[..run.length];
        half.widen(block, x.map_or(&y[range.clone()], |x| &x[range.clone()]));
        keep_in_place(block, run.index, run.key, threshold, scale);
        half.narrow(&mut y[range], block);
    });
}

/// Calls `each` for runs of at most `longest` elements that cover the rank's shard in order.
fn for_each_run(call: &KernelCall<'_>, sizes: &Dropout, longest: usize, mut each: impl FnMut(Run)) {
    let Dropout { first_sample, samples, site: DropoutSite { site, .. }, .. } = *sizes;
    let row = sizes.positions * sizes.features;
    let first = call.group_index * sizes.positions;
    for sample in 0..samples {
        let number = first_sample + call.samples_before + sample;
        for positions in position_runs(sizes.zigzag, first..first + sizes.positions) {
            let start = sample * row + positions.start * sizes.features;
            let (first, elements) = (positions.position * sizes.features, positions.length * sizes.features);
            let mut done = 0;
            while done < elements {
                let index = (first + done) as u64;
                let until_next = (1u64 << 32) - (index & u64::from(u32::MAX));
                let length = (elements - done).min(longest).min(usize::try_from(until_next).unwrap_or(usize::MAX));
                let words = [call.hyperparameters.seed, call.hyperparameters.step, site as u64, number as u64, index >> 32];
                let key = words.into_iter().fold(0, |state, word| split_mix(state ^ word));
                each(Run { start: start + done, length, index: index as u32, key });
                done += length;
            }
        }
    }
}

/// Dropout of a rank's attention probabilities.
#[derive(Clone, Copy)]
pub(super) struct ProbabilityDropout {
    place: AttentionPlace,
    /// The order of positions in the sequence, if it is not ascending.
    order: Option<Zigzag>,
    /// Query heads per key head of this rank.
    group: usize,
    /// Hash key, made of seed, step and site.
    key: u64,
    threshold: u32,
    scale: f32,
}

impl ProbabilityDropout {
    /// Dropout of an attention call; `None` if the call has no dropout.
    pub(super) fn of(call: &KernelCall<'_>, sizes: &Attention) -> Option<Self> {
        let dropout = sizes.dropout?;
        let DropoutSite { rate, site } = dropout.site;
        let words = [call.hyperparameters.seed, call.hyperparameters.step, site as u64];
        Some(Self {
            place: sizes.place(&dropout, call.group_index, call.samples_before),
            order: sizes.zigzag,
            group: sizes.group,
            key: words.into_iter().fold(0, |state, word| split_mix(state ^ word)),
            threshold: rate.threshold(),
            scale: rate.scale(),
        })
    }

    /// The positions of the rank's queries, as runs.
    pub(super) fn queries(&self, queries: usize) -> impl Iterator<Item = PositionRun> {
        position_runs(self.order, self.place.query..self.place.query + queries)
    }

    /// The positions of the rank's keys, in the order in which they are stored.
    pub(super) fn keys(&self, keys: usize) -> impl Iterator<Item = PositionRun> {
        position_runs(self.order, self.place.key..self.place.key + keys)
    }

    /// Drops probabilities in `rows`: one row for each query, from position `query` on, and one
    /// column for each key. `image` is the sample's number; it and `head` are counted within the
    /// rank. `keys` are the runs of the rank's keys, which may have more keys than there are
    /// columns. Kept elements are scaled by the inverse of the keep rate.
    pub(super) fn drop_some(&self, rows: &mut [f32], columns: usize, keys: &[PositionRun], [image, head, query]: [usize; 3]) {
        let words = [self.place.sample + image, self.place.head(head, self.group)];
        let key = words.into_iter().fold(self.key, |state, word| split_mix(state ^ word as u64));
        for (row, query) in rows.chunks_exact_mut(columns.max(1)).zip(query..) {
            let key = split_mix(key ^ query as u64);
            for run in keys {
                let row = &mut row[run.start.min(columns)..(run.start + run.length).min(columns)];
                keep_in_place(row, run.position as u32, key, self.threshold, self.scale);
            }
        }
    }
}

/// One round of SplitMix64.
fn split_mix(state: u64) -> u64 {
    let state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let state = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    state ^ (state >> 31)
}

/// A 32-bit finaliser with low bias, found by search (Wellons 2018).
#[inline(always)]
fn finalise(x: u32) -> u32 {
    let x = (x ^ (x >> 16)).wrapping_mul(0x7FEB_352D);
    let x = (x ^ (x >> 15)).wrapping_mul(0x846C_A68B);
    x ^ (x >> 16)
}

/// Whether the element at an index is kept.
#[inline(always)]
fn is_kept(index: u32, key: u64, threshold: u32) -> bool {
    finalise(finalise(index.wrapping_add(key as u32)) ^ (key >> 32) as u32) >= threshold
}

multiversion! {
    fn keep_in_place(y: &mut [f32], index: u32, key: u64, threshold: u32, scale: f32) {
        for (offset, y) in y.iter_mut().enumerate() {
            *y = if is_kept(index.wrapping_add(offset as u32), key, threshold) { *y * scale } else { 0.0 };
        }
    }
}
