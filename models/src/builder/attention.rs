//! Attention and the rotary positions of its queries and keys.

use super::{GraphBuilder, operand, shardable, walk};
use crate::attention::{Attention, RelativePositions, Rope};
use crate::dropout::{AttentionDropout, DropoutRate};
use crate::graph::{Extent, Loop, LoopId, TensorId};
use crate::kernel::Kernel;
use crate::storage::Storage;

/// Properties of attention, besides its inputs.
#[derive(Clone, Copy)]
pub(crate) struct AttentionKind {
    /// Whether a position only attends to itself and to positions before it.
    pub(crate) causal: bool,
    /// Whether scores are multiplied by `1/√head_dimension`.
    pub(crate) scaled: bool,
    /// Keys that a query sees on each side, itself among them. `None`: all.
    pub(crate) window: Option<usize>,
    /// Relative positions, with their table.
    pub(crate) relative: Option<(RelativePositions, TensorId)>,
    /// Dropout rate of the probabilities.
    pub(crate) dropout: DropoutRate,
}

impl GraphBuilder {
    /// Adds a rotary position embedding of x `[batch, sequence, heads.., head_dimension]`, of its
    /// first `rotated` features or of all.
    pub(crate) fn rope(&mut self, name: &str, x: TensorId, theta: usize, rotated: Option<usize>) -> TensorId {
        let dimensions = self.dimensions(x);
        let last = dimensions.len() - 1;
        let loops = dimensions
            .iter()
            .enumerate()
            .map(|(index, dimension)| match index {
                0 => shardable(dimension, Extent::Rows),
                1 => shardable(dimension, Extent::Positions),
                index if index < last => shardable(dimension, Extent::Heads),
                _ => Loop { shardable: false, ..shardable(dimension, Extent::Features) },
            })
            .collect();
        let all = walk(0, dimensions.len());
        let y = self.activation(name, dimensions, Storage::Precision);
        let sizes = Rope {
            batch: 0,
            positions: 0,
            heads: 0,
            head_dimension: 0,
            rotated,
            theta,
            position_parts: 1,
            position_offset: 0,
            zigzag: None,
        };
        self.operator(name, Kernel::Rope(sizes), loops, vec![operand(x, all.clone())], vec![operand(y, all)]);
        y
    }

    /// Adds attention of q `[batch, sequence, heads (, group), head_dimension]` over k and v
    /// `[batch, keys, heads, head_dimension]`. Heads of v may have other features. A table of
    /// relative positions is `[buckets, heads (, group)]`.
    pub(crate) fn attention(&mut self, name: &str, [q, k, v]: [TensorId; 3], kind: AttentionKind) -> TensorId {
        let AttentionKind { causal, scaled, window, relative, dropout } = kind;
        let query = self.dimensions(q);
        let [key, value] = [k, v].map(|tensor| self.dimensions(tensor));
        let head_count = query.len() - 3;
        let heads = &query[2..2 + head_count];
        let mut loops = vec![shardable(&query[0], Extent::Rows)];
        loops.extend(heads.iter().zip([Extent::Heads, Extent::Group]).map(|(head, role)| shardable(head, role)));
        let head_loops = walk(1, head_count);
        let [sequence, keys, features] = [1, 2, 3].map(|place| Some(LoopId(head_count + place)));
        loops.push(shardable(&query[1], Extent::Positions));
        loops.push(Loop { name: "keys", shardable: false, ..shardable(&key[1], Extent::Keys) });
        loops.push(Loop { shardable: false, ..shardable(&query[2 + head_count], Extent::Features) });
        let value_features = value[value.len() - 1];
        let mut values = features;
        if value_features.extent != query[2 + head_count].extent {
            values = Some(LoopId(loops.len()));
            loops.push(Loop { name: "value_features", shardable: false, ..shardable(&value_features, Extent::Columns) });
        }
        let batch = Some(LoopId(0));
        let query_axes = [vec![batch, sequence], head_loops.clone(), vec![features]].concat();
        let key_axes = vec![batch, keys, head_loops[0], features];
        let value_axes = vec![batch, keys, head_loops[0], values];
        let out_axes = [vec![batch, sequence], head_loops.clone(), vec![values]].concat();
        let out_dimensions = [&query[..2 + head_count], &[value_features]].concat();
        let log_sum_dimensions = [&query[..1], heads, &query[1..2]].concat();
        let log_sum_axes = [vec![batch], head_loops.clone(), vec![sequence]].concat();
        let out = self.activation(name, out_dimensions, Storage::Precision);
        let log_sum_exp = self.activation(&format!("{name}.log_sum_exp"), log_sum_dimensions, Storage::Single);
        let mut inputs = vec![operand(q, query_axes), operand(k, key_axes), operand(v, value_axes)];
        if let Some((_, table)) = relative {
            inputs.push(operand(table, [vec![None], head_loops].concat()));
        }
        let dropout = self.dropout_site(dropout).map(|site| AttentionDropout {
            site,
            first_sample: 0,
            position_parts: 1,
            head_parts: 1,
            group_parts: 1,
            sample_parts: 1,
        });
        let sizes = Attention {
            batch: 0,
            queries: 0,
            keys: 0,
            key_heads: 0,
            group: 0,
            head_dimension: 0,
            value_dimension: None,
            causal,
            scaled,
            window,
            relative: relative.map(|(relative, _)| relative),
            packed: false,
            query_parts: 1,
            query_offset: 0,
            zigzag: None,
            ring: None,
            dropout,
        };
        self.operator(
            name,
            Kernel::Attention(sizes),
            loops,
            inputs,
            vec![operand(out, out_axes), operand(log_sum_exp, log_sum_axes)],
        );
        out
    }
}
