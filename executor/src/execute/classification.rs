//! The measures of a classifier, from the scores and the label of each sample: confusion matrix,
//! precision, recall, F1 and the area under the ROC curve, with the definitions of scikit-learn.
//!
//! No result depends on the order of the samples, so layouts agree. It knows no ranks.

use serde::{Deserialize, Serialize};

/// The measures of a classifier.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Classification {
    /// Mean precision over the classes that occur as a label or a prediction.
    pub precision: f64,
    /// Mean recall over these classes.
    pub recall: f64,
    /// Mean F1 over these classes.
    pub f1: f64,
    /// Mean, over classes, of the area under the ROC curve of a class against the rest. Only
    /// classes with samples of both kinds count; `None` if there are none.
    pub roc_auc: Option<f64>,
    /// By class.
    pub per_class: PerClass,
    /// By label, then by prediction: the number of samples.
    pub confusion: Vec<Vec<u64>>,
}

/// The measures of each class.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PerClass {
    /// The fraction of the predictions of a class that are right; 0 without predictions.
    pub precision: Vec<f64>,
    /// The fraction of the samples of a class that are predicted right; 0 without samples.
    pub recall: Vec<f64>,
    /// The harmonic mean of precision and recall; 0 if both are 0.
    pub f1: Vec<f64>,
    /// The number of samples.
    pub support: Vec<u64>,
    /// The area under the ROC curve of the class against the rest; `None` without samples of both
    /// kinds.
    pub roc_auc: Vec<Option<f64>>,
}

/// Measures a classifier. Each sample has the probability of each class, then its label. Samples
/// with a negative label do not count. `None` without samples that count.
pub fn classification(samples: &[Vec<f32>]) -> Option<Classification> {
    let counted: Vec<(&[f32], usize)> = samples
        .iter()
        .filter_map(|sample| sample.split_last())
        .filter(|(label, scores)| **label >= 0.0 && (**label as usize) < scores.len())
        .map(|(label, scores)| (scores, *label as usize))
        .collect();
    let classes = counted.first()?.0.len();
    let mut confusion = vec![vec![0; classes]; classes];
    for &(scores, label) in counted.iter().filter(|(scores, _)| scores.len() == classes) {
        confusion[label][first_maximum(scores)] += 1;
    }
    let per_class = per_class(&counted, &confusion);
    let is_seen = |class: usize| per_class.support[class] > 0 || confusion.iter().any(|row| row[class] > 0);
    let seen: Vec<usize> = (0..classes).filter(|&class| is_seen(class)).collect();
    let mean = |values: &[f64]| seen.iter().map(|&class| values[class]).sum::<f64>() / seen.len() as f64;
    let areas: Vec<f64> = per_class.roc_auc.iter().flatten().copied().collect();
    Some(Classification {
        precision: mean(&per_class.precision),
        recall: mean(&per_class.recall),
        f1: mean(&per_class.f1),
        roc_auc: (!areas.is_empty()).then(|| areas.iter().sum::<f64>() / areas.len() as f64),
        per_class,
        confusion,
    })
}

/// The first of the largest scores, as `argmax` has it.
fn first_maximum(scores: &[f32]) -> usize {
    let mut best = 0;
    for (class, score) in scores.iter().enumerate() {
        if *score > scores[best] {
            best = class;
        }
    }
    best
}

fn per_class(samples: &[(&[f32], usize)], confusion: &[Vec<u64>]) -> PerClass {
    let share = |part: u64, whole: u64| if whole == 0 { 0.0 } else { part as f64 / whole as f64 };
    let mut all = PerClass::default();
    for (class, row) in confusion.iter().enumerate() {
        let right = row[class];
        let support: u64 = row.iter().sum();
        let predicted: u64 = confusion.iter().map(|row| row[class]).sum();
        all.precision.push(share(right, predicted));
        all.recall.push(share(right, support));
        all.f1.push(share(2 * right, support + predicted));
        all.support.push(support);
        let scores = samples.iter().map(|&(scores, label)| (scores[class], label == class)).collect();
        all.roc_auc.push(area_under_roc(scores));
    }
    all
}

/// The area under the ROC curve: the fraction of the pairs of a positive and a negative sample in
/// which the positive one has the larger score. Equal scores count one half (Hanley and McNeil
/// 1982).
fn area_under_roc(mut samples: Vec<(f32, bool)>) -> Option<f64> {
    samples.sort_by(|sample, other| sample.0.total_cmp(&other.0));
    let positives = samples.iter().filter(|sample| sample.1).count();
    let negatives = samples.len() - positives;
    if positives == 0 || negatives == 0 {
        return None;
    }
    // Twice the pairs in order, so that halves are whole.
    let (mut twice_in_order, mut negatives_below) = (0_u128, 0_u128);
    for equal in samples.chunk_by(|sample, other| sample.0 == other.0) {
        let positive = equal.iter().filter(|sample| sample.1).count() as u128;
        let negative = equal.len() as u128 - positive;
        twice_in_order += positive * (2 * negatives_below + negative);
        negatives_below += negative;
    }
    Some(twice_in_order as f64 / (2.0 * positives as f64 * negatives as f64))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A case that `tests/metrics/scikit_learn.py` wrote.
    #[derive(Deserialize)]
    struct Case {
        samples: Vec<Vec<f32>>,
        precision: Vec<f64>,
        recall: Vec<f64>,
        f1: Vec<f64>,
        support: Vec<u64>,
        /// Mean precision, recall and F1.
        r#macro: [f64; 3],
        roc_auc: Vec<f64>,
        macro_roc_auc: f64,
        confusion: Vec<Vec<u64>>,
    }

    #[derive(Deserialize)]
    struct Golden {
        cases: Vec<Case>,
    }

    fn assert_close(ours: &[f64], theirs: &[f64], what: &str) {
        assert_eq!(ours.len(), theirs.len(), "{what}");
        for (ours, theirs) in ours.iter().zip(theirs) {
            assert!((ours - theirs).abs() < 1e-6, "{what}: {ours} for {theirs}");
        }
    }

    #[test]
    fn measures_are_those_of_scikit_learn() {
        let golden: Golden = serde_json::from_str(include_str!("scikit_learn.json")).expect("it is JSON");
        assert_eq!(golden.cases.len(), 3);
        for case in golden.cases {
            let ours = classification(&case.samples).expect("there are samples");
            assert_close(&ours.per_class.precision, &case.precision, "precision");
            assert_close(&ours.per_class.recall, &case.recall, "recall");
            assert_close(&ours.per_class.f1, &case.f1, "F1");
            assert_close(&[ours.precision, ours.recall, ours.f1], &case.r#macro, "means");
            let areas: Vec<f64> = ours.per_class.roc_auc.iter().map(|area| area.expect("both kinds")).collect();
            assert_close(&areas, &case.roc_auc, "areas");
            assert_close(&[ours.roc_auc.expect("both kinds")], &[case.macro_roc_auc], "mean area");
            assert_eq!((ours.per_class.support, ours.confusion), (case.support, case.confusion));
            // In any order, and beside samples that do not count.
            let mut others = case.samples.clone();
            others.reverse();
            let classes = others[0].len() - 1;
            others.push([vec![0.5; classes], vec![-1.0]].concat());
            assert_eq!(classification(&others), classification(&case.samples));
        }
    }

    #[test]
    fn classes_without_samples_of_both_kinds_have_no_area() {
        let only = classification(&[vec![0.75, 0.25, 0.0]]).expect("a sample");
        assert_eq!((only.roc_auc, only.per_class.roc_auc), (None, vec![None, None]));
        assert_eq!((only.precision, only.recall, only.f1), (1.0, 1.0, 1.0));
        assert_eq!(classification(&[vec![0.75, 0.25, -1.0]]), None);
        assert_eq!(classification(&[]), None);
    }
}
