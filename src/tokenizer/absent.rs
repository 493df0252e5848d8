//! Replaces the reader in a build without the feature `tokenizers`: no tokenizer can be created.

use crate::failure::{Failure, code};
use std::path::Path;

/// A tokenizer. This build cannot create one.
pub enum Tokenizer {}

impl Tokenizer {
    /// Refuses the file `path`.
    pub fn read(_: &str, path: &Path) -> Result<Self, Failure> {
        let hint = "build it with `cargo build --release --features tokenizers`, or give tokens in place of texts";
        Err(Failure::undone(code::NOT_BUILT, format!("this build of Foretell cannot read the tokenizer `{}`", path.display()))
            .hint(hint))
    }

    /// Is never called, as are the methods below.
    pub fn id(&self, _: &str) -> Option<u32> {
        match *self {}
    }

    pub fn vocabulary(&self) -> usize {
        match *self {}
    }

    pub fn encode_batch(&self, _: Vec<String>) -> Result<Vec<Vec<u32>>, String> {
        match *self {}
    }

    pub fn encode(&self, _: &str) -> Result<Vec<u32>, String> {
        match *self {}
    }

    pub fn decode(&self, _: &[u32]) -> Result<String, String> {
        match *self {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_build_without_tokenizers_says_how_to_get_them() {
        let refused = Tokenizer::read("{}", Path::new("tokenizer.json")).err().expect("no tokenizer can be made");
        let hint = refused.diagnostic().help().map(|hint| hint.to_string());
        assert!(hint.is_some_and(|hint| hint.contains("--features tokenizers")), "{}", refused.one_line());
    }
}
