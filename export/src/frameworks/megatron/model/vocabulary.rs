//! The size of a model's vocabulary, which Megatron takes from its tokenizer.

use super::super::super::stated::Stated;
use super::super::super::{FrameworkError, Surroundings};
use foretell_models::Model;

/// The vocabulary of GPT-2's tokenizer, which Megatron has by name.
const GPT2_VOCAB: usize = 50_257;

/// The vocabulary of Llama 2's tokenizer, which Megatron has by name.
const LLAMA2_VOCAB: usize = 32_000;

/// Reads the size of the vocabulary. Without it, the model's size is not defined.
pub(super) fn read_vocabulary(stated: &mut Stated, surroundings: &Surroundings<'_>) -> Result<usize, FrameworkError> {
    let tokenizer = stated.text("tokenizer-type").ok().flatten();
    let padded = stated.size("padded-vocab-size")?;
    let words = stated.size("vocab-size")?;
    let words = match (padded.or(words), tokenizer.as_deref()) {
        // Megatron's tokenizer without a vocabulary adds one word.
        (Some(words), Some("NullTokenizer")) if padded.is_none() => Some(words.saturating_add(1)),
        (words, _) => words,
    };
    if let (Some(words), Some(asked)) = (words, surroundings.vocab)
        && words != asked
    {
        return Err(FrameworkError::Form {
            reason: format!("the arguments say {words} words of the vocabulary, and `--vocab` says {asked}"),
            hint: "leave out `--vocab`".into(),
        });
    }
    if let Some(words) = words.or(surroundings.vocab) {
        return Ok(words);
    }
    if let Some((words, why)) = known_vocabulary(stated, tokenizer.as_deref()) {
        stated.assume(format!("`vocab` {words}: {why}"));
        return Ok(words);
    }
    Err(FrameworkError::Form {
        reason: "the arguments do not state the size of the vocabulary, which Megatron takes from its tokenizer".into(),
        hint: "say the tokenizer's number of words with `--vocab`".into(),
    })
}

/// The vocabulary of a well-known tokenizer, with words that name its source.
fn known_vocabulary(stated: &Stated, tokenizer: Option<&str>) -> Option<(usize, String)> {
    let file = |name: &str| stated.peek(name).and_then(|value| value.as_str().map(String::from));
    if tokenizer == Some("GPT2BPETokenizer") || file("vocab-file").is_some_and(|path| path.contains("gpt2")) {
        return Some((GPT2_VOCAB, "that of GPT-2's tokenizer".into()));
    }
    if tokenizer == Some("Llama2Tokenizer") {
        return Some((LLAMA2_VOCAB, "that of Llama 2's tokenizer".into()));
    }
    let name = file("tokenizer-model").filter(|_| tokenizer == Some("HuggingFaceTokenizer"))?;
    let model = Model::named_on_hub(&name)?;
    let known = Model::named(model).ok()?;
    Some((known.as_decoder()?.vocab, format!("that of `{model}`, whose tokenizer `{name}` is")))
}
