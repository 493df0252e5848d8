//! Text generation with a trained language model: one token after the other, from the logits of
//! the model's forward Program on one CPU core.
//!
//! Each token runs the whole sequence again; there is no cache of keys and values. The module knows
//! tokens, and no texts.

use crate::arena::Arenas;
use crate::checkpoint::StateSource;
use crate::error::ExecutorError;
use crate::executable;
use crate::initialise::initialise;
use crate::interpreter::ForwardInterpreter;
use crate::state::RankState;
use foretell_models::{GraphOptions, Model, SampleShape};
use foretell_program::{Compiler, Layout, Plan, Program, Rank};
use foretell_units::Bytes;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;
use std::path::Path;

/// How the next token is chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// The divisor of logits before the softmax. 0 takes the most likely token.
    pub temperature: f64,
    /// The number of most likely tokens to choose from; `None` for all.
    pub top_k: Option<usize>,
    /// The seed of the choice.
    pub seed: u64,
}

/// A token that was generated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NextToken {
    /// Its number in the vocabulary.
    pub token: u32,
    /// The logarithm of the probability that the model gives it, at temperature 1.
    pub log_probability: f64,
}

/// A language model with its weights, for sequences up to a length.
#[derive(Debug)]
pub struct Generator {
    program: Program,
    arenas: Arenas,
    length: usize,
    vocabulary: usize,
}

impl Generator {
    /// Reads the weights of a model, for sequences of at most `length` tokens.
    ///
    /// # Errors
    /// [`ExecutorError`] if the model does not predict next tokens, is not executable or has
    /// shorter sequences, or if the weights cannot be read or belong to another model.
    pub fn open(model: &Model, name: &str, weights: &Path, length: usize) -> Result<Self, ExecutorError> {
        executable(model)?;
        let refused = |what: String, hint: &str| ExecutorError::Unsupported { what, hint: hint.into() };
        let SampleShape::Tokens { sequence, vocabulary } = model.sample() else {
            let what = format!("text generation with a model of the family `{}`", model.family());
            return Err(refused(what, "use a GPT, a Llama, or another decoder"));
        };
        if model.experts().is_some() {
            // Experts of limited capacity drop tokens, so a longer sequence changes earlier tokens.
            let what = "text generation with a mixture of experts".into();
            return Err(refused(what, "use a GPT, a Llama, or another decoder without experts"));
        }
        if length > sequence || length == 0 {
            let what = format!("a text of {length} tokens with a model of sequences of 1 to {sequence}");
            return Err(refused(what, "ask for fewer tokens, or give a shorter prompt"));
        }
        // Computing positions beyond the text would be wasted. The first rows of a longer model's
        // table of positions are the shorter model's.
        let short = model.with_sequence(length).unwrap_or_else(|| model.clone());
        let mut plan = Plan::new(Layout::default(), 1);
        plan.training.lora = StateSource::adapters(weights)?;
        let program = Compiler::new(&short, name).logits(&plan)?;
        let list = program.list_of(Rank(0));
        let arenas = Arenas::new(list.arena, Bytes::ZERO, None)?;
        let graph = |model: &Model| plan.training.graph(model, name, &GraphOptions::ONE);
        let source = StateSource::finite_weights(weights, &graph(model)?)?;
        initialise(&RankState::new(&program, &graph(&short)?, Rank(0)), &arenas, &source, 0)?;
        Ok(Self { program, arenas, length, vocabulary })
    }

    /// Generates tokens after those of the prompt, until the length is reached or `ends` says that
    /// a token ends the text.
    ///
    /// # Errors
    /// [`ExecutorError::Unsupported`] for an empty prompt or a token beyond the vocabulary, and
    /// errors of kernels.
    pub fn generate(
        &mut self,
        prompt: &[u32],
        sampling: &Sampling,
        mut ends: impl FnMut(NextToken) -> bool,
    ) -> Result<Vec<NextToken>, ExecutorError> {
        let refused = |what: String, hint: String| Err(ExecutorError::Unsupported { what, hint });
        if prompt.is_empty() {
            return refused("an empty prompt".into(), "give at least one token".into());
        }
        if let Some(token) = prompt.iter().find(|&&token| token as usize >= self.vocabulary) {
            let hint = format!("the model's tokens are below {}; use the tokenizer that it was trained with", self.vocabulary);
            return refused(format!("the token {token}"), hint);
        }
        let mut forward = ForwardInterpreter::new(&self.program, &mut self.arenas)?;
        let mut random = ChaCha8Rng::seed_from_u64(sampling.seed);
        let mut tokens: Vec<i32> = prompt.iter().map(|&token| token as i32).collect();
        let mut made = Vec::new();
        while tokens.len() < self.length {
            let logits = forward.run(&tokens)?;
            let first = (tokens.len() - 1) * self.vocabulary;
            let next = choose(&logits[first..first + self.vocabulary], sampling, &mut random);
            made.push(next);
            if ends(next) {
                break;
            }
            tokens.push(next.token as i32);
        }
        Ok(made)
    }
}

/// Chooses a token. Of equal logits, the first token counts as the more likely one.
fn choose(logits: &[f32], sampling: &Sampling, random: &mut ChaCha8Rng) -> NextToken {
    let logit = |token: usize| f64::from(logits[token]);
    let mut tokens: Vec<usize> = (0..logits.len()).collect();
    tokens.sort_by(|&token, &other| logit(other).total_cmp(&logit(token)));
    let most_likely = *tokens.first().expect("invariant: a vocabulary has a token");
    let highest = logit(most_likely);
    let sum: f64 = logits.iter().map(|&logit| (f64::from(logit) - highest).exp()).sum();
    let token = if sampling.temperature == 0.0 {
        most_likely
    } else {
        tokens.truncate(sampling.top_k.unwrap_or(usize::MAX).max(1));
        let weight = |token: usize| ((logit(token) - highest) / sampling.temperature).exp();
        let mut left = random.random::<f64>() * tokens.iter().map(|&token| weight(token)).sum::<f64>();
        let chosen = tokens.iter().copied().find(|&token| {
            left -= weight(token);
            left < 0.0
        });
        // Rounding may leave a rest of the probability after the last token.
        chosen.or(tokens.last().copied()).unwrap_or(most_likely)
    };
    NextToken { token: token as u32, log_probability: logit(token) - highest - sum.ln() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOGITS: [f32; 4] = [1.0, 3.0, 3.0, f32::NEG_INFINITY];

    fn counts(temperature: f64, top_k: Option<usize>) -> [usize; 4] {
        let sampling = Sampling { temperature, top_k, seed: 0 };
        let mut random = ChaCha8Rng::seed_from_u64(7);
        let mut counts = [0; 4];
        (0..10_000).for_each(|_| counts[choose(&LOGITS, &sampling, &mut random).token as usize] += 1);
        counts
    }

    #[test]
    fn without_temperature_the_first_of_the_most_likely_tokens_is_taken() {
        assert_eq!(counts(0.0, None), [0, 10_000, 0, 0]);
        assert_eq!(counts(1.0, Some(1)), [0, 10_000, 0, 0]);
    }

    #[test]
    fn tokens_come_as_often_as_their_probabilities_at_the_temperature() {
        for temperature in [0.5, 1.0, 4.0] {
            let weights = LOGITS.map(|logit| (f64::from(logit) / temperature).exp());
            let sum: f64 = weights.iter().sum();
            for (count, weight) in counts(temperature, None).into_iter().zip(weights) {
                assert!((count as f64 / 10_000.0 - weight / sum).abs() < 0.02, "{count} of 10,000 at {temperature}");
            }
        }
        let [first, second, third, last] = counts(1.0, Some(2));
        assert!(first == 0 && last == 0 && second.abs_diff(third) < 400, "{second} and {third}");
    }

    #[test]
    fn a_tokens_log_probability_does_not_depend_on_the_temperature() {
        let mut random = ChaCha8Rng::seed_from_u64(0);
        let expected = -(1.0 + 0.5 * (-2.0_f64).exp()).ln() - 2.0_f64.ln();
        for temperature in [0.0, 0.3] {
            let sampling = Sampling { temperature, top_k: Some(2), seed: 0 };
            let next = choose(&LOGITS, &sampling, &mut random);
            assert!((next.log_probability - expected).abs() < 1e-12, "{next:?}");
        }
    }
}
