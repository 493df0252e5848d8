//! Notes for the user of an imported trace: what was assumed, what was estimated roughly, and what
//! the traced step itself measured.

use super::document::{Document, Measured};
use crate::builder::GraphOptions;
use crate::families::{Network, NetworkOperation};
use crate::model::Model;
use crate::optimizer::Optimizer;
use std::collections::BTreeMap;

/// Operators whose operands are read by tensor cores, and so have the format of a run.
const PRODUCTS: [&str; 7] = ["mm", "addmm", "bmm", "baddbmm", "convolution", "_scaled_dot_product_flash_attention", "linear"];

/// The number format of most products, or that of most parameters.
pub(super) fn base_format(document: &Document) -> &str {
    let products = document.operators.iter().filter(|operator| PRODUCTS.contains(&operator.short()));
    let formats = products.filter_map(|operator| Some(operator.results.first()?.dtype.as_str()));
    most(formats).or_else(|| most(document.parameters.iter().map(|parameter| parameter.dtype.as_str()))).unwrap_or("f32")
}

fn most<'a>(formats: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    formats.for_each(|format| *counts.entry(format).or_default() += 1);
    counts.into_iter().max_by_key(|&(_, count)| count).map(|(format, _)| format)
}

/// The optimizer that a plan would use.
pub(super) fn optimizer(document: &Document, notes: &mut Notes) -> Optimizer {
    let name = document.optimizer.as_ref().map_or("none", |optimizer| optimizer.name.as_str());
    match name {
        "SGD" => Optimizer::Sgd,
        "Adam" => Optimizer::Adam,
        "AdamW" | "FusedAdam" => Optimizer::AdamW,
        "Lamb" | "LAMB" | "FusedLAMB" => Optimizer::Lamb,
        other => {
            notes.others.push(format!("the optimizer `{other}` is planned as AdamW"));
            Optimizer::AdamW
        }
    }
}

/// Observations during the translation.
#[derive(Debug, Default)]
pub(super) struct Notes {
    /// Operators without a mapping: how many, and elements that they write for one sample.
    unknown: BTreeMap<String, (usize, usize)>,
    masks: usize,
    of_parameters: usize,
    sums: BTreeMap<String, usize>,
    unread: usize,
    others: Vec<String>,
}

impl Notes {
    pub(super) fn unknown(&mut self, operator: &str, elements: usize) {
        let entry = self.unknown.entry(operator.into()).or_default();
        *entry = (entry.0 + 1, entry.1.saturating_add(elements));
    }

    pub(super) fn masks(&mut self) {
        self.masks += 1;
    }

    /// Notes an operator that reads only parameters.
    pub(super) fn of_parameters(&mut self) {
        self.of_parameters += 1;
    }

    /// Notes an operator that sums over samples, and whose result is used as if it were a constant.
    pub(super) fn sum_over_samples(&mut self, operator: &str) {
        *self.sums.entry(operator.into()).or_default() += 1;
    }

    pub(super) fn unread_parameters(&mut self, count: usize) {
        self.unread = count;
    }

    /// The notes, one sentence each.
    pub(super) fn finish(self, document: &Document, network: &Network) -> Vec<String> {
        let mut notes: Vec<String> = document.assumed.iter().map(|line| format!("assumed by the trace: {line}")).collect();
        if !self.unknown.is_empty() {
            let list: Vec<String> = self
                .unknown
                .iter()
                .map(|(name, (count, elements))| format!("`{name}` ({count} times, {elements} numbers a sample)"))
                .collect();
            notes.push(format!("operators without a mapping count as reading and writing their operands: {}", list.join(", ")));
        }
        if self.masks > 0 {
            notes.push(format!("the masks that {} attentions read are not counted", self.masks));
        }
        if self.of_parameters > 0 {
            notes.push(format!(
                "{} operators read parameters alone: they are not counted, and their results count as the largest of those",
                self.of_parameters
            ));
        }
        for (name, count) in &self.sums {
            notes.push(format!("`{name}` sums over the samples ({count} times): its result counts as a constant"));
        }
        if self.unread > 0 {
            notes.push(format!("no operator that the loss depends on reads {} of the parameters", self.unread));
        }
        notes.extend(self.others);
        notes.extend(checkpoints(document));
        notes.extend(frozen(document));
        notes.extend(formats(document));
        notes.extend(figures(document, network));
        notes
    }
}

fn checkpoints(document: &Document) -> Option<String> {
    let mut numbers: Vec<u64> = document.operators.iter().filter_map(|operator| operator.checkpoint).collect();
    numbers.dedup();
    let count = numbers.len();
    (count > 0).then(|| format!("the step checkpoints {count} times: `recompute: full` plans the same, block by block"))
}

fn frozen(document: &Document) -> Option<String> {
    let frozen: Vec<&str> =
        document.parameters.iter().filter(|parameter| !parameter.trained).map(|parameter| parameter.name.as_str()).collect();
    let first = frozen.first()?;
    Some(format!(
        "`{first}` is frozen, and so are {} other parameters: a plan says so with `training: {{frozen: [..]}}`",
        frozen.len() - 1
    ))
}

fn formats(document: &Document) -> Option<String> {
    let base = base_format(document);
    let own = most(document.parameters.iter().map(|parameter| parameter.dtype.as_str()))?;
    (base != "f32").then(|| {
        format!("the step multiplies in {base} and keeps its parameters in {own}: plan with `--precision {}`", name(base))
    })
}

fn name(format: &str) -> &str {
    match format {
        "bf16" => "bf16",
        "f16" => "fp16",
        _ => "fp32",
    }
}

/// The traced step's own figures, and how its arithmetic compares with the graph's.
fn figures(document: &Document, network: &Network) -> Vec<String> {
    let Some(Measured { batch, sequence, peak_bytes, forward_flops, backward_flops }) = document.measured.first() else {
        return Vec::new();
    };
    let gib = *peak_bytes as f64 / f64::from(1 << 30);
    let length = sequence.map_or_else(String::new, |length| format!(" and a sequence of {length}"));
    let mut notes = vec![format!(
        "the traced step allocates {gib:.2} GiB at its peak with a batch of {batch}{length}, all in all {:.4e} FLOPs",
        (*forward_flops as f64) + (*backward_flops as f64)
    )];
    let batch = usize::try_from(*batch).unwrap_or(1);
    let own = Model::Network(network.clone()).graph("traced", &GraphOptions { batch, ..GraphOptions::ONE });
    let is_same_size = document.sizes.sequence == *sequence;
    if let Some(graph) = own.ok().filter(|_| is_same_size) {
        let traced = document.operators.iter().fold(0.0, |sum, operator| sum + operator.flops as f64);
        let planned = graph.model_flops().value();
        let difference = (planned / traced.max(1.0) - 1.0) * 100.0;
        if traced > 0.0 && difference.abs() >= 1.0 {
            notes.push(format!(
                "the forward pass has {planned:.4e} FLOPs here and {traced:.4e} by PyTorch's count ({difference:+.1} %)"
            ));
        }
    }
    let products = network.layers.iter().filter(|layer| matches!(layer.operation, NetworkOperation::Work { .. })).count();
    if products == network.layers.len() {
        notes.push("no operator has a kernel of its own".into());
    }
    notes
}
