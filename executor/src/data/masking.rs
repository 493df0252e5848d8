//! Masked language modelling (Devlin et al. 2019): in each sample a fixed number of tokens is
//! masked, and the model predicts them.
//!
//! The choice depends on the seed, the split and the sample alone. So it is the same in every
//! epoch, as in the masked files that BERT was trained on.

use super::order::{Purpose, below, stream};
use super::{IGNORED_LABEL, Split};

/// The token `[MASK]` in BERT's vocabularies.
const BERT_MASK: usize = 103;
/// A smaller vocabulary is not BERT's. Then the last token is the mask.
const MIN_BERT_VOCABULARY: usize = 1000;

/// Chooses `predictions` of the tokens. Each is replaced by the mask with probability 0.8, by a
/// random token with probability 0.1, and left unchanged otherwise. Its label is the original
/// token. All other labels are [`IGNORED_LABEL`].
pub(crate) fn mask(
    seed: u64,
    split: Split,
    index: usize,
    vocabulary: usize,
    predictions: usize,
    tokens: &mut [i32],
    labels: &mut [i32],
) {
    let purpose = match split {
        Split::Training => Purpose::TrainingMask,
        Split::Evaluation => Purpose::EvaluationMask,
    };
    let mut random = stream(seed, purpose, index as u64);
    let mask_token = if vocabulary < MIN_BERT_VOCABULARY { vocabulary.saturating_sub(1) } else { BERT_MASK };
    labels.fill(IGNORED_LABEL);
    // The first steps of a Fisher-Yates shuffle choose the positions.
    let mut positions: Vec<usize> = (0..tokens.len()).collect();
    for chosen in 0..predictions.min(positions.len()) {
        let other = chosen + below(&mut random, (positions.len() - chosen) as u64) as usize;
        positions.swap(chosen, other);
        let position = positions[chosen];
        labels[position] = tokens[position];
        match below(&mut random, 10) {
            0 => tokens[position] = below(&mut random, vocabulary as u64) as i32,
            1 => {}
            _ => tokens[position] = mask_token as i32,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn masked(seed: u64, index: usize) -> (Vec<i32>, Vec<i32>) {
        let mut tokens: Vec<i32> = (0..40).map(|token| token % 7).collect();
        let mut labels = vec![5; 40];
        mask(seed, Split::Training, index, 50, 6, &mut tokens, &mut labels);
        (tokens, labels)
    }

    #[test]
    fn labels_are_the_original_tokens_at_the_masked_positions() {
        let mut masks = 0;
        for index in 0..200 {
            let (tokens, labels) = masked(1, index);
            let positions: Vec<usize> = (0..40).filter(|&position| labels[position] != IGNORED_LABEL).collect();
            assert_eq!(positions.len(), 6, "all different");
            assert!(positions.iter().all(|&position| labels[position] == position as i32 % 7));
            masks += positions.iter().filter(|&&position| tokens[position] == 49).count();
            let others = (0..40).filter(|position| !positions.contains(position));
            assert!(others.into_iter().all(|position| tokens[position] == position as i32 % 7));
        }
        assert!((900..1020).contains(&masks), "about eight of ten: {masks} of 1200");
    }

    #[test]
    fn the_masked_positions_depend_on_the_seed_and_the_sample_alone() {
        assert_eq!(masked(1, 3), masked(1, 3));
        assert_ne!(masked(1, 3), masked(1, 4));
        assert_ne!(masked(1, 3), masked(2, 3));
    }
}
