//! Where the losses of a step begin: the operators that sum or average over samples.

use super::document::{Document, TracedDimension, TracedValue};
use std::collections::BTreeSet;

/// The values between the samples and the losses: those that all samples share.
pub(super) struct LossTerms {
    /// First results of operators that read values of each sample and give one that all samples
    /// share.
    terms: BTreeSet<usize>,
    /// First results of operators that read only such values.
    behind: BTreeSet<usize>,
}

fn has_batch(value: &TracedValue) -> bool {
    let is_batch =
        |dimension: &TracedDimension| matches!(dimension, TracedDimension::Formula(terms) if terms.first() == Some(&1.0));
    value.shape.iter().any(is_batch)
}

impl LossTerms {
    pub(super) fn new(document: &Document) -> Self {
        let first = document.parameters.len() + document.inputs.len() + document.constants.len();
        let mut starts = Vec::with_capacity(document.operators.len());
        let mut batched: Vec<bool> = vec![false; document.parameters.len()];
        batched.extend(document.inputs.iter().chain(&document.constants).map(has_batch));
        for operator in &document.operators {
            starts.push(batched.len());
            batched.extend(operator.results.iter().map(has_batch));
        }
        let mut wanted: BTreeSet<usize> = document.losses.iter().copied().collect();
        let mut terms = Self { terms: BTreeSet::new(), behind: BTreeSet::new() };
        for (operator, &start) in document.operators.iter().zip(&starts).rev() {
            let results = start..start + operator.results.len();
            if !results.clone().any(|value| wanted.contains(&value) && !batched[value]) {
                continue;
            }
            if operator.reads.iter().any(|&read| read >= first - document.constants.len() && batched.get(read) == Some(&true)) {
                terms.terms.insert(start);
            } else {
                terms.behind.insert(start);
                wanted.extend(operator.reads.iter().copied().filter(|&read| read >= first && read < start));
            }
        }
        terms
    }

    /// Whether the operator with this first result sums over the samples.
    pub(super) fn is_term(&self, result: usize) -> bool {
        self.terms.contains(&result)
    }

    /// Whether the operator with this first result only reads such sums.
    pub(super) fn is_behind(&self, result: usize) -> bool {
        self.behind.contains(&result)
    }
}
