//! Attention, and what turns its queries and keys.

use super::{Given, Tensor, index3, kept};
use crate::Hyperparameters;
use foretell_models::{Attention, Kernel, Rope, Zigzag};

/// The writes of a kernel of this kind; of no other.
pub(super) fn run(kernel: &Kernel, given: &Given<'_>) -> Option<Vec<Tensor>> {
    let Given { reads, group_index, parameters, .. } = *given;
    let added = |index, value| given.added(index, value);
    Some(match *kernel {
        Kernel::Attention(sizes) => {
            let [_, k, v] = unpacked(&sizes, reads);
            let (d, heads, queries) = (sizes.head_dimension, sizes.heads(), sizes.queries);
            let mut out = vec![0.0; sizes.query_elements()];
            let mut log_sums = vec![0.0; sizes.rows()];
            debug_assert_eq!(k.len(), v.len());
            attend(&sizes, reads, position_part(&sizes, group_index), |b, h, i, probabilities, log_sum| {
                log_sums[(b * heads + h) * queries + i] = log_sum;
                for (j, p) in probabilities.iter().enumerate() {
                    let keep = keeps(&sizes, parameters, group_index, [b, h, i, j]);
                    for f in 0..d {
                        let value = v[((b * sizes.keys + j) * sizes.key_heads + h / sizes.group) * d + f];
                        out[((b * queries + i) * heads + h) * d + f] += p * keep * value;
                    }
                }
            });
            vec![out, log_sums]
        }
        Kernel::AttentionGradient(sizes) => {
            let (dout, forward) = (&reads[0], &reads[1..]);
            let [q, k, v] = unpacked(&sizes, forward);
            let (d, heads, queries) = (sizes.head_dimension, sizes.heads(), sizes.queries);
            let [mut dq, mut dk, mut dv] = [&q, &k, &v].map(|x| vec![0.0; x.len()]);
            let mut dtable = vec![0.0; sizes.table_elements()];
            // The table follows the output and its log-sum-exp here.
            let mut inputs: Vec<Tensor> = forward[..if sizes.packed { 1 } else { 3 }].to_vec();
            inputs.extend(sizes.relative.map(|_| reads[reads.len() - 1].clone()));
            let part = position_part(&sizes, group_index);
            attend(&sizes, &inputs, part, |b, h, i, probabilities, _| {
                let keep = |j: usize| keeps(&sizes, parameters, group_index, [b, h, i, j]);
                let at_q = |f: usize| ((b * queries + i) * heads + h) * d + f;
                let at_k = |j: usize, f: usize| ((b * sizes.keys + j) * sizes.key_heads + h / sizes.group) * d + f;
                let slope = |j: usize| keep(j) * (0..d).map(|f| dout[at_q(f)] * v[at_k(j, f)]).sum::<f64>();
                let slopes: Vec<f64> = (0..probabilities.len()).map(slope).collect();
                let mean = probabilities.iter().zip(&slopes).map(|(p, s)| p * s).sum::<f64>();
                for (j, (p, slope)) in probabilities.iter().zip(&slopes).enumerate() {
                    let biased = p * (slope - mean);
                    if sizes.relative.is_some() {
                        dtable[bucket(&sizes, part, i, j) * heads + h] += biased;
                    }
                    let score = if sizes.scaled { biased / (d as f64).sqrt() } else { biased };
                    for f in 0..d {
                        dq[at_q(f)] += score * k[at_k(j, f)];
                        dk[at_k(j, f)] += score * q[at_q(f)];
                        dv[at_k(j, f)] += p * keep(j) * dout[at_q(f)];
                    }
                }
            });
            let mut written = if sizes.packed {
                let row = heads * d;
                let joined = index3([sizes.batch * queries, 3, row]).map(|[r, part, c]| [&dq, &dk, &dv][part][r * row + c]);
                vec![joined.collect()]
            } else {
                vec![dq, dk, dv]
            };
            if sizes.relative.is_some() {
                let index = written.len();
                written.push(added(index, dtable));
            }
            written
        }
        Kernel::Rope(sizes) => vec![turned(&sizes, group_index, &reads[0], 1.0)],
        Kernel::RopeGradient(sizes) => vec![turned(&sizes, group_index, &reads[0], -1.0)],
        _ => return None,
    })
}

/// The position that is stored at an index.
fn position(order: Option<Zigzag>, index: usize) -> usize {
    order.map_or(index, |order| order.position(index))
}

/// Every pair of features of every head turned by its position's angle.
fn turned(sizes: &Rope, group_index: usize, x: &[f64], direction: f64) -> Tensor {
    let (d, rotated) = (sizes.head_dimension, sizes.rotated.unwrap_or(sizes.head_dimension));
    let half = rotated / 2;
    let mut y = x.to_vec();
    for [b, p, h] in index3([sizes.batch, sizes.positions, sizes.heads]) {
        let position = position(sizes.zigzag, sizes.position_offset + group_index * sizes.positions + p);
        for f in 0..half {
            let angle = direction * position as f64 / (sizes.theta as f64).powf(2.0 * f as f64 / rotated as f64);
            let at = ((b * sizes.positions + p) * sizes.heads + h) * d + f;
            y[at] = x[at] * angle.cos() - x[at + half] * angle.sin();
            y[at + half] = x[at + half] * angle.cos() + x[at] * angle.sin();
        }
    }
    y
}

/// q, k and v, each in a tensor of its own.
fn unpacked(sizes: &Attention, reads: &[Tensor]) -> [Tensor; 3] {
    if !sizes.packed {
        return [reads[0].clone(), reads[1].clone(), reads[2].clone()];
    }
    let row = sizes.heads() * sizes.head_dimension;
    let rows = sizes.batch * sizes.queries;
    [0, 1, 2].map(|part| index3([rows, 1, row]).map(|[r, _, c]| reads[0][(r * 3 + part) * row + c]).collect())
}

/// Which part of the positions a rank has: where heads are cut too, their part varies faster.
fn position_part(sizes: &Attention, group_index: usize) -> usize {
    group_index / sizes.dropout.map_or(1, |dropout| dropout.head_parts * dropout.group_parts)
}

/// What the probability of a key is multiplied by before values are summed.
fn keeps(sizes: &Attention, parameters: &Hyperparameters, group_index: usize, [b, h, i, j]: [usize; 4]) -> f64 {
    let Some(dropout) = sizes.dropout else { return 1.0 };
    let (parts, head_parts) = (dropout.position_parts, dropout.head_parts * dropout.group_parts);
    let (part, head_part) = (group_index / head_parts, group_index % head_parts);
    // In a ring's step t keys are of the part t ranks before.
    let key_part = sizes.ring.map_or(0, |ring| (part + parts - ring.step) % parts);
    let key_head = head_part / dropout.group_parts * sizes.key_heads + h / sizes.group;
    let member = head_part % dropout.group_parts * sizes.group + h % sizes.group;
    let head = key_head * sizes.group * dropout.group_parts + member;
    let query = position(sizes.zigzag, part * sizes.queries + i);
    let words = [dropout.site.site, dropout.first_sample + b, head, query].map(|word| word as u64);
    kept(parameters, dropout.site.rate, &words, position(sizes.zigzag, key_part * sizes.keys + j) as u32)
}

/// T5's bucket of a key `j` seen from the query `i` of a part.
fn bucket(sizes: &Attention, part: usize, i: usize, j: usize) -> usize {
    let relative = sizes.relative.unwrap();
    let distance = j as f64 - (sizes.query_offset + part * sizes.queries + i) as f64;
    let (side, distance) = if relative.bidirectional { (2, distance) } else { (1, distance.min(0.0)) };
    let buckets = relative.buckets / side;
    let after = if relative.bidirectional && distance > 0.0 { buckets } else { 0 };
    let (distance, exact) = (distance.abs(), (buckets / 2) as f64);
    let place = if distance < exact {
        distance
    } else {
        // A border that lies on a whole number is not to be missed by rounding.
        let part = (distance / exact).ln() / (relative.max_distance as f64 / exact).ln() * (buckets as f64 - exact);
        (exact + (part + 1e-9).floor()).min(buckets as f64 - 1.0)
    };
    after + place as usize
}

/// Calls `each(batch, head, query, probabilities, log-sum-exp)` for every query.
fn attend(sizes: &Attention, reads: &[Tensor], part: usize, mut each: impl FnMut(usize, usize, usize, &[f64], f64)) {
    let [q, k, _] = unpacked(sizes, reads);
    let (d, heads) = (sizes.head_dimension, sizes.heads());
    let offset = sizes.query_offset + part * sizes.queries;
    for [b, h, i] in index3([sizes.batch, heads, sizes.queries]) {
        let score = |j: usize| {
            let at_q = ((b * sizes.queries + i) * heads + h) * d;
            let at_k = ((b * sizes.keys + j) * sizes.key_heads + h / sizes.group) * d;
            let dot = (0..d).map(|f| q[at_q + f] * k[at_k + f]).sum::<f64>();
            let bias = sizes.relative.map_or(0.0, |_| reads[reads.len() - 1][bucket(sizes, part, i, j) * heads + h]);
            bias + if sizes.scaled { dot / (d as f64).sqrt() } else { dot }
        };
        let query = position(sizes.zigzag, offset + i);
        let is_seen = |j: usize| !sizes.causal || position(sizes.zigzag, j) <= query;
        let scores: Vec<f64> = (0..sizes.keys).map(|j| if is_seen(j) { score(j) } else { f64::NEG_INFINITY }).collect();
        let log_sum = scores.iter().map(|s| s.exp()).sum::<f64>().ln();
        let probabilities: Vec<f64> = scores.iter().map(|s| (s - log_sum).exp()).collect();
        each(b, h, i, &probabilities, log_sum);
    }
}
