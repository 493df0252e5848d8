//! Tokenizers of Hugging Face's models: texts to tokens, and the reverse. The crate that reads them
//! is a tenth of a build, so it is behind the feature `tokenizers`, which wheels and releases have;
//! a build without it refuses the files.

#[cfg(any(test, not(feature = "tokenizers")))]
#[cfg_attr(feature = "tokenizers", allow(dead_code, reason = "its test alone uses it"))]
mod absent;
#[cfg(feature = "tokenizers")]
mod hugging_face;

use crate::failure::{Failure, code};
use crate::inputs;
use std::path::Path;

#[cfg(not(feature = "tokenizers"))]
pub use absent::Tokenizer;
#[cfg(feature = "tokenizers")]
pub use hugging_face::Tokenizer;

/// Whether this build reads tokenizers.
pub const IS_AVAILABLE: bool = cfg!(feature = "tokenizers");

/// Names of the token that ends a document, in common tokenizers.
const ENDS_OF_TEXT: [&str; 5] = ["<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>"];

/// Reads a `tokenizer.json`.
pub fn open(path: &Path) -> Result<Tokenizer, Failure> {
    Tokenizer::read(&inputs::read(path)?, path)
}

/// The token that ends a text, with its name: the stated one, or the first common one that the
/// tokenizer has.
pub fn end_of_text(tokenizer: &Tokenizer, path: &Path, stated: Option<&str>) -> Result<Option<(u32, String)>, Failure> {
    let id = |name: &str| Some((tokenizer.id(name)?, name.to_owned()));
    match stated {
        Some(name) => id(name).map(Some).ok_or_else(|| {
            let hint = "name one of its `added_tokens`";
            Failure::input(code::TOKENIZER, format!("`{}` has no token `{name}`", path.display())).hint(hint)
        }),
        None => Ok(ENDS_OF_TEXT.into_iter().find_map(id)),
    }
}
