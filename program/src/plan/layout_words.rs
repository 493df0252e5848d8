//! A layout in words: its dimensions with their values, for tables and sentences. It must not know
//! what a layout costs.

use super::{ContextMethod, ContextOrder, Layout, Recompute, StageLayout};
use std::fmt::Display;

/// One dimension of a layout.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayoutDimension {
    /// The title of its column.
    pub title: &'static str,
    /// Its value in a word, for a cell.
    pub cell: String,
    /// Its value in a sentence; `None` if it is the usual value, which goes without saying.
    pub words: Option<String>,
    /// Whether the cell leaves out part of the value.
    pub is_abridged: bool,
}

impl Layout {
    /// The dimensions in the order in which papers usually state them. Equal layouts have equal
    /// dimensions, and each list has the same titles in the same order.
    pub fn dimensions(&self) -> Vec<LayoutDimension> {
        let is_uniform = self.stages.is_none();
        let mesh = |title, size: &dyn Fn(&StageLayout) -> usize, is_always_said: bool| {
            let mut sizes: Vec<usize> = self.stages.iter().flatten().map(size).collect();
            sizes.dedup();
            if sizes.is_empty() {
                sizes.push(size(&self.stage(0)));
            }
            let cell = sizes.iter().map(usize::to_string).collect::<Vec<_>>().join("/");
            let is_said = is_uniform && (is_always_said || sizes != [1]);
            LayoutDimension { title, words: is_said.then(|| format!("{title} {cell}")), cell, is_abridged: false }
        };
        let pipeline = match &self.stages {
            Some(stages) => format!("pipeline {}, of {}", self.pipeline, meshes(stages)),
            None => format!("pipeline {}", self.pipeline),
        };
        vec![
            mesh("data", &|stage| stage.data, true),
            mesh("tensor", &|stage| stage.tensor, true),
            said("pipeline", self.pipeline, Some(pipeline)),
            mesh("context", &|stage| stage.context, false),
            self.context_method_dimension(),
            self.context_order_dimension(),
            mesh("expert", &|stage| stage.expert, false),
            optional("expert tensor", self.expert_tensor, "experts over "),
            self.schedule_dimension(),
            usual_unless(self.zero > 0, "ZeRO", self.zero, "ZeRO "),
            optional("shard group", self.shard_group, "shard groups of "),
            LayoutDimension {
                title: "sequence parallel",
                cell: if self.sequence_parallel { "yes" } else { "no" }.into(),
                words: self.sequence_parallel.then(|| "sequence parallel".into()),
                is_abridged: false,
            },
            self.recompute_dimension(),
            self.offload_dimension(),
            optional("loss chunk", self.loss_chunk, "loss in chunks of "),
            optional("MLP chunk", self.mlp_chunk, "MLPs in chunks of "),
            usual_unless(!self.collective.is_automatic(), "all-reduce", self.collective.name(), "all-reduce by "),
            long("placement", self.placement.as_deref(), "the pipeline inside the nodes", |_| None),
            LayoutDimension {
                title: "operators",
                cell: if self.operators.is_empty() { "by rule" } else { "one by one" }.into(),
                words: (!self.operators.is_empty()).then(|| "operators sharded one by one".into()),
                is_abridged: !self.operators.is_empty(),
            },
            long("blocks", self.cuts.as_deref(), "blocks", |cuts| Some(in_runs(cuts))),
            long("stage places", self.stage_places.as_deref(), "stages at places", |places| Some(in_stretches(places))),
            long("shares", self.shares.as_deref(), "shares of samples", |shares| Some(in_runs(shares))),
            usual_unless(self.bucket != Layout::default().bucket, "bucket", self.bucket, "buckets of "),
            said("micro-batch", self.micro_batch, Some(format!("micro-batch {}", self.micro_batch))),
        ]
    }

    /// The layout in words, without dimensions that have their usual values.
    pub fn in_words(&self) -> String {
        self.dimensions().into_iter().filter_map(|dimension| dimension.words).collect::<Vec<_>>().join(", ")
    }

    fn context_order_dimension(&self) -> LayoutDimension {
        let has_parts = self.cuts_sequences();
        let is_unusual = has_parts && self.context_order == ContextOrder::Contiguous;
        let words = is_unusual.then(|| "contiguous parts of sequences".to_owned());
        said("context order", if has_parts { self.context_order.name() } else { "-" }, words)
    }

    fn context_method_dimension(&self) -> LayoutDimension {
        let has_parts = self.cuts_sequences();
        let words = match (has_parts, self.context_method) {
            (true, ContextMethod::Ring) => Some("ring attention".to_owned()),
            (true, ContextMethod::AllToAll) => Some("attention by heads".to_owned()),
            (true, ContextMethod::Gather) | (false, _) => None,
        };
        said("context method", if has_parts { self.context_method.name() } else { "-" }, words)
    }

    fn schedule_dimension(&self) -> LayoutDimension {
        if !self.follows_schedule() {
            return said("schedule", "-", None);
        }
        let (name, chunks) = (self.schedule.name(), self.virtual_stages);
        if chunks > 1 {
            said("schedule", format!("{name} x {chunks}"), Some(format!("{name} of {chunks} chunks")))
        } else {
            said("schedule", name, Some(name.into()))
        }
    }

    fn recompute_dimension(&self) -> LayoutDimension {
        let cell = match &self.recompute {
            Recompute::None => "none",
            Recompute::Selective => "selective",
            Recompute::Full => "full",
            Recompute::FullLayers(_) | Recompute::FullLayersOfStages(_) | Recompute::AllBut(_) => "in part",
        };
        let words = (self.recompute != Recompute::None).then(|| format!("recompute {}", self.recompute));
        LayoutDimension { is_abridged: cell == "in part", ..said("recompute", cell, words) }
    }

    fn offload_dimension(&self) -> LayoutDimension {
        if self.offload == super::Offload::State {
            return said("offload", "state", Some("parameters and optimizer state offloaded".to_owned()));
        }
        let (state, activations) = (self.offload.is_of_optimizer(), self.offload.is_of_activations());
        let (cell, words) = match (state, activations) {
            (false, false) => ("none", None),
            (true, false) => ("optimizer", Some("optimizer state offloaded")),
            (false, true) => ("activations", Some("activations offloaded")),
            (true, true) => ("both", Some("optimizer state offloaded, activations offloaded")),
        };
        said("offload", cell, words.map(str::to_owned))
    }
}

fn said(title: &'static str, cell: impl Display, words: Option<String>) -> LayoutDimension {
    LayoutDimension { title, cell: cell.to_string(), words, is_abridged: false }
}

/// A dimension whose words, `before` and the value, are given only if it `is_unusual`.
fn usual_unless(is_unusual: bool, title: &'static str, value: impl Display, before: &str) -> LayoutDimension {
    let words = is_unusual.then(|| format!("{before}{value}"));
    said(title, value, words)
}

/// A size that most layouts do not state.
fn optional(title: &'static str, size: Option<usize>, before: &str) -> LayoutDimension {
    said(title, size.map_or_else(|| "-".into(), |size| size.to_string()), size.map(|size| format!("{before}{size}")))
}

/// A dimension whose value is a list, too long for a cell.
fn long<T>(title: &'static str, list: Option<&[T]>, words: &str, in_words: impl Fn(&[T]) -> Option<String>) -> LayoutDimension {
    let said_as = |list: &[T]| in_words(list).map_or_else(|| words.to_owned(), |list| format!("{words} {list}"));
    LayoutDimension {
        title,
        cell: if list.is_some() { "own" } else { "usual" }.into(),
        words: list.map(said_as),
        is_abridged: list.is_some(),
    }
}

/// Describes stages with their own meshes: `2 stages of data 4, tensor 2, then 4 stages of data 6,
/// tensor 1`.
fn meshes(stages: &[StageLayout]) -> String {
    let of_run = |run: &[StageLayout]| {
        let StageLayout { data, tensor, context, expert, .. } = &run[0];
        let plural = if run.len() > 1 { "s" } else { "" };
        let others = [("context", context), ("expert", expert)].into_iter().filter(|(_, size)| **size > 1);
        let others: String = others.map(|(name, size)| format!(", {name} {size}")).collect();
        format!("{} stage{plural} of data {data}, tensor {tensor}{others}", run.len())
    };
    stages.chunk_by(|stage, next| stage == next).map(of_run).collect::<Vec<_>>().join(", then ")
}

/// Formats numbers with consecutive runs joined: `25-49, 0-24`.
fn in_stretches(numbers: &[usize]) -> String {
    let stretches = numbers.chunk_by(|number, next| *next == number + 1);
    stretches
        .map(|stretch| match stretch {
            [first, .., last] => format!("{first}-{last}"),
            _ => stretch.iter().map(usize::to_string).collect(),
        })
        .collect::<Vec<_>>()
        .join(", ")
}

/// Formats numbers with repeats counted: `8 x 5, 8 x 3`.
fn in_runs(numbers: &[usize]) -> String {
    let runs = numbers.chunk_by(|number, next| number == next);
    runs.map(|run| if run.len() > 1 { format!("{} x {}", run.len(), run[0]) } else { run[0].to_string() })
        .collect::<Vec<_>>()
        .join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_usual_goes_without_saying() {
        let layout = Layout { data: 4, zero: 1, micro_batch: 2, ..Layout::default() };
        assert_eq!(layout.in_words(), "data 4, tensor 1, pipeline 1, ZeRO 1, micro-batch 2");
    }

    #[test]
    fn each_list_has_the_same_titles() {
        let titles = |layout: &Layout| layout.dimensions().iter().map(|dimension| dimension.title).collect::<Vec<_>>();
        let stages =
            Some(vec![StageLayout { data: 4, ..StageLayout::default() }, StageLayout { tensor: 4, ..StageLayout::default() }]);
        let unequal = Layout { pipeline: 2, stages, cuts: Some(vec![7, 19]), ..Layout::default() };
        assert_eq!(titles(&unequal), titles(&Layout::default()));
        assert_eq!(
            unequal.in_words(),
            "pipeline 2, of 1 stage of data 4, tensor 1, then 1 stage of data 1, tensor 4, 1f1b, blocks 7, 19, micro-batch 1"
        );
    }
}
