//! The reader by Hugging Face's own crate.

use crate::failure::{Failure, code};
use std::path::Path;

/// A tokenizer as a model's `tokenizer.json` describes it.
pub struct Tokenizer(tokenizers::Tokenizer);

impl Tokenizer {
    /// Reads the text of the file `path`.
    pub fn read(text: &str, path: &Path) -> Result<Self, Failure> {
        text.parse().map(Tokenizer).map_err(|error| {
            let hint = "give the `tokenizer.json` of a model on Hugging Face";
            Failure::input(code::FILE_FORM, format!("`{}` is not a tokenizer: {error}", path.display())).hint(hint)
        })
    }

    /// The token of a name.
    pub fn id(&self, name: &str) -> Option<u32> {
        self.0.token_to_id(name)
    }

    /// One more than the largest token; 0 without tokens.
    pub fn vocabulary(&self) -> usize {
        self.0.get_vocab(true).into_values().max().map_or(0, |highest| highest as usize + 1)
    }

    /// The tokens of each text, computed on all cores.
    pub fn encode_batch(&self, texts: Vec<String>) -> Result<Vec<Vec<u32>>, String> {
        let encoded = self.0.encode_batch(texts, false).map_err(|error| error.to_string())?;
        Ok(encoded.iter().map(|encoding| encoding.get_ids().to_vec()).collect())
    }

    /// The tokens of a text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, String> {
        self.0.encode(text, false).map(|encoding| encoding.get_ids().to_vec()).map_err(|error| error.to_string())
    }

    /// The text of tokens, without special ones.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, String> {
        self.0.decode(tokens, true).map_err(|error| error.to_string())
    }
}
