//! Tokenizers of Hugging Face's models: reading them, and their token for the end of a text.

use crate::failure::Failure;
use crate::inputs;
use std::path::Path;
use tokenizers::Tokenizer;

/// What the end of a document is called, by usual tokenizers.
const ENDS_OF_TEXT: [&str; 5] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>"];

/// Reads a `tokenizer.json`.
pub fn open(path: &Path) -> Result<Tokenizer, Failure> {
    let text = inputs::read(path)?;
    text.parse().map_err(|error| {
        let hint = "give the `tokenizer.json` of a model on Hugging Face";
        Failure::Input(format!("`{}` is not a tokenizer: {error}; hint: {hint}", path.display()))
    })
}

/// The token that ends a text, with its name: the stated one, or the first usual one that the
/// tokenizer has.
pub fn end_of_text(tokenizer: &Tokenizer, path: &Path, stated: Option<&str>) -> Result<Option<(u32, String)>, Failure> {
    let id = |name: &str| Some((tokenizer.token_to_id(name)?, name.to_owned()));
    match stated {
        Some(name) => id(name).map(Some).ok_or_else(|| {
            let hint = "name one of its `added_tokens`";
            Failure::Input(format!("`{}` has no token `{name}`; hint: {hint}", path.display()))
        }),
        None => Ok(ENDS_OF_TEXT.into_iter().find_map(id)),
    }
}
