//! Masked language modelling (Devlin et al. 2019): of each sample a fixed number of tokens is hidden and to be found.
//!
//! Which they are depends on the seed, the split and the sample alone, so that they are the same in every epoch, as BERT's were.

use super::order::{Purpose, below, stream};
use super::{IGNORED_LABEL, Split};

/// The place of `[MASK]` in BERT's vocabularies.
const BERT_MASK: usize = 103;
/// A vocabulary smaller than this is none of BERT's: there the last token stands for the mask.
const SMALLEST_WORD_PIECES: usize = 1000;

/// Hides `predictions` of the tokens: eight of ten behind the mask, one of ten behind a random token, one of ten not at all. Their
/// labels are what they were; no other position has one.
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
    let hidden = if vocabulary < SMALLEST_WORD_PIECES { vocabulary.saturating_sub(1) } else { BERT_MASK };
    labels.fill(IGNORED_LABEL);
    let mut left: Vec<usize> = (0..tokens.len()).collect();
    for chosen in 0..predictions.min(left.len()) {
        let other = chosen + below(&mut random, (left.len() - chosen) as u64) as usize;
        left.swap(chosen, other);
        let position = left[chosen];
        labels[position] = tokens[position];
        match below(&mut random, 10) {
            0 => tokens[position] = below(&mut random, vocabulary as u64) as i32,
            1 => {}
            _ => tokens[position] = hidden as i32,
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
    fn labels_are_what_the_masked_tokens_were() {
        let mut behind_the_mask = 0;
        for index in 0..200 {
            let (tokens, labels) = masked(1, index);
            let positions: Vec<usize> = (0..40).filter(|&position| labels[position] != IGNORED_LABEL).collect();
            assert_eq!(positions.len(), 6, "each a position of its own");
            assert!(positions.iter().all(|&position| labels[position] == position as i32 % 7));
            behind_the_mask += positions.iter().filter(|&&position| tokens[position] == 49).count();
            let others = (0..40).filter(|position| !positions.contains(position));
            assert!(others.into_iter().all(|position| tokens[position] == position as i32 % 7));
        }
        assert!((900..1020).contains(&behind_the_mask), "about eight of ten: {behind_the_mask} of 1200");
    }

    #[test]
    fn the_mask_is_the_samples_own_and_stays() {
        assert_eq!(masked(1, 3), masked(1, 3));
        assert_ne!(masked(1, 3), masked(1, 4));
        assert_ne!(masked(1, 3), masked(2, 3));
    }
}
