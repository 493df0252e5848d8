//! Attention, a step of ring attention, and rotary positions.

use super::{KernelFamily, KernelOperand, KernelSpec, product, read, update, write};
use crate::attention::{Attention, RingStep, Rope};

#[inline(always)]
fn extents(sizes: &Attention) -> [usize; 7] {
    let Attention { batch, queries, keys, key_heads, group, head_dimension, .. } = *sizes;
    // One size stands for both head dimensions: the time follows their mean.
    let features = (head_dimension + sizes.value_features()) / 2;
    // All query-key pairs over those that are not masked.
    let masking = (queries as f64 * keys as f64 / sizes.scores().max(1.0)).round() as usize;
    [batch, queries, keys, key_heads, group, features, masking]
}

#[inline(always)]
fn flags(sizes: &Attention) -> [bool; 4] {
    let merges = sizes.ring.is_some_and(RingStep::merges);
    [sizes.causal, sizes.packed, sizes.relative.is_some() || merges, sizes.dropout.is_some()]
}

/// Operations for each query-key pair, over all heads and sequences, of products with queries or
/// keys and of products with values.
#[inline(always)]
fn head_flops(sizes: &Attention, [by_keys, by_values]: [f64; 2]) -> f64 {
    let features = by_keys * sizes.head_dimension as f64 + by_values * sizes.value_features() as f64;
    2.0 * product(&[sizes.batch, sizes.heads()]) * features
}

#[inline(always)]
pub(in crate::kernel) fn attention(sizes: &Attention) -> KernelSpec {
    let Attention { packed, relative, ring, .. } = *sizes;
    let [q, k, rows] = [sizes.query_elements(), sizes.key_elements(), sizes.rows()];
    let [v, result] = [sizes.value_elements(), sizes.output_elements()];
    let mut operands = [
        read("qkv", 3 * q).when(packed),
        read("q", q).when(!packed),
        read("k", k).when(!packed),
        read("v", v).when(!packed),
        read("table", sizes.table_elements()).when(relative.is_some()),
        write("out", result),
        write("log_sum_exp", rows).single(),
    ];
    if let Some(ring) = ring {
        let [.., out, log_sum_exp] = &mut operands;
        *out = out.single();
        if ring.merges() {
            [*out, *log_sum_exp] = [update(out.role, result), update(log_sum_exp.role, rows)];
        }
        // A step that sees no keys reads and writes nothing.
        if ring.unseen {
            operands = operands.map(KernelOperand::uncounted);
        }
    }
    KernelSpec {
        flags: flags(sizes),
        flops: Some(head_flops(sizes, [1.0, 1.0]) * sizes.scores()),
        model_flops: Some(head_flops(sizes, [1.0, 1.0]) * product(&[sizes.queries, sizes.keys])),
        ..KernelSpec::new("attention", KernelFamily::Attention, extents(sizes), operands)
    }
}

#[inline(always)]
pub(in crate::kernel) fn attention_gradient(sizes: &Attention) -> KernelSpec {
    let Attention { packed, relative, ring, .. } = *sizes;
    let [q, k, rows, table] = [sizes.query_elements(), sizes.key_elements(), sizes.rows(), sizes.table_elements()];
    let [v, result] = [sizes.value_elements(), sizes.output_elements()];
    let mut reads = [
        read("dout", result),
        if packed { read("qkv", 3 * q) } else { read("q", q) },
        read("k", k).when(!packed),
        read("v", v).when(!packed),
        read("out", result),
        read("log_sum_exp", rows).single(),
        read("table", table).when(relative.is_some()),
    ];
    let mut writes = [
        if packed { write("dqkv", 3 * q) } else { write("dq", q) },
        write("dk", k).when(!packed),
        write("dv", v).when(!packed),
        write("dtable", table).single().when(relative.is_some()),
    ];
    if let Some(ring) = ring {
        writes = writes.map(KernelOperand::single);
        if ring.merges() {
            writes[0] = update("dq", q);
        }
        // A step that sees no keys only writes zeros to dk and dv.
        if ring.unseen {
            reads = reads.map(KernelOperand::uncounted);
            writes[0] = writes[0].uncounted();
        }
    }
    let [dout, qkv, key, value, out, log_sum_exp, positions] = reads;
    let [dqkv, dk, dv, dtable] = writes;
    KernelSpec {
        flags: flags(sizes),
        // One product recomputes the scores, and four make the gradients.
        flops: Some(head_flops(sizes, [3.0, 2.0]) * sizes.scores()),
        model_flops: Some(head_flops(sizes, [2.0, 2.0]) * product(&[sizes.queries, sizes.keys])),
        ..KernelSpec::new("attention_gradient", KernelFamily::Attention, extents(sizes), [
            dout, qkv, key, value, out, log_sum_exp, positions, dqkv, dk, dv, dtable,
        ])
    }
}

/// Describes a rotary embedding, or its gradient.
#[inline(always)]
pub(in crate::kernel) fn rope(name: &'static str, roles: [&'static str; 2], sizes: &Rope) -> KernelSpec {
    let extents = [sizes.batch, sizes.positions, sizes.heads, sizes.head_dimension];
    KernelSpec {
        flops: Some(3.0 * sizes.elements() as f64),
        may_work_in_place: true,
        ..KernelSpec::new(name, KernelFamily::Rope, extents, [
            read(roles[0], sizes.elements()),
            write(roles[1], sizes.elements()),
        ])
    }
}
