//! The zoo: models by name. Families define some. The others are published models that are often
//! fine-tuned, each by its configuration on Hugging Face's hub (one line of `published.jsonl`),
//! which is read as a user's own `config.json` is. Their sequences are at most 4,096 positions,
//! whatever a model could take.

use crate::error::ModelError;
use crate::hugging_face::from_hugging_face;
use crate::model::Model;
use foretell_units::suggest;
use serde::Deserialize;
use serde_json::Value;
use std::sync::LazyLock;

/// A line of the list.
#[derive(Debug, Deserialize)]
struct Line {
    name: String,
    /// The number of parameters of Transformers' model.
    #[cfg(test)]
    parameters: usize,
    /// Names on the hub other than the zoo's, in lower case, without their owner and without
    /// endings such as `-instruct`.
    hub: Vec<String>,
    config: Value,
}

/// A published model.
#[derive(Debug)]
pub(crate) struct Published {
    pub(crate) name: String,
    pub(crate) hub: Vec<String>,
    pub(crate) model: Model,
}

/// The list, in its order.
pub(crate) static PUBLISHED: LazyLock<Vec<Published>> = LazyLock::new(|| {
    let model = |Line { name, hub, config, .. }: Line| Published {
        model: from_hugging_face(&config.to_string(), None).expect("invariant: published configurations are read").model,
        name,
        hub,
    };
    lines().map(model).collect()
});

fn lines() -> impl Iterator<Item = Line> {
    let line = |line| serde_json::from_str(line).expect("invariant: a line is a model");
    include_str!("published.jsonl").lines().map(line)
}

impl Model {
    /// Returns the zoo: named models, in the order of listings.
    pub fn zoo() -> impl Iterator<Item = (&'static str, Model)> {
        let published = std::iter::once_with(|| PUBLISHED.iter())
            .flatten()
            .map(|published| (published.name.as_str(), published.model.clone()));
        Self::of_families().chain(published)
    }

    /// Returns the model of the zoo with this name, or with this name on Hugging Face's hub.
    ///
    /// # Errors
    /// [`ModelError::Unknown`], with the names that exist.
    pub fn named(name: &str) -> Result<Self, ModelError> {
        let of_zoo = |name: &str| Self::zoo().find(|(known, _)| *known == name).map(|(_, model)| model);
        of_zoo(name).or_else(|| of_zoo(Self::named_on_hub(name)?)).ok_or_else(|| ModelError::Unknown {
            name: name.into(),
            hint: format!("{}; or give a model file, or the `config.json` of the hub", suggest(name, Self::names())),
        })
    }

    /// Returns the zoo's name of a model of Hugging Face's hub (`Qwen/Qwen3-8B`). A fine-tuned
    /// version (`-Instruct`) counts as the same model, since its sizes are the same.
    pub fn named_on_hub(name: &str) -> Option<&'static str> {
        const ENDINGS: [&str; 6] = ["-instruct", "-it", "-chat", "-base", "-hf", "-v0.1"];
        let mut last = name.trim_end_matches('/').rsplit('/').next()?.trim().to_ascii_lowercase().replace(' ', "-");
        let published = |last: &String| PUBLISHED.iter().find(|known| known.name == *last || known.hub.contains(last));
        // An ending may be part of the zoo's name (`roberta-base`).
        loop {
            if let Some(published) = published(&last) {
                return Some(&published.name);
            }
            let Some(rest) = ENDINGS.iter().find_map(|ending| last.strip_suffix(ending)) else { break };
            last = rest.into();
        }
        let last = last.strip_prefix("meta-").unwrap_or(&last);
        let last = last.strip_prefix("llama-").map_or_else(|| last.to_owned(), |rest| format!("llama{rest}"));
        // Releases 3, 3.1 and 3.3 differ only in how positions are scaled.
        let last = last.replace("llama3.1-", "llama3-").replace("llama3.3-", "llama3-");
        Self::names().find(|known| *known == last)
    }

    /// Returns the names of the zoo, in the order of listings.
    pub fn names() -> impl Iterator<Item = &'static str> {
        Self::zoo().map(|(name, _)| name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::GraphOptions;

    #[test]
    fn published_models_have_as_many_parameters_as_transformers_counts() {
        for (line, published) in lines().zip(PUBLISHED.iter()) {
            let graph = published.model.graph(&line.name, &GraphOptions::ONE).expect("the model is sound");
            assert_eq!(graph.parameter_count(), line.parameters, "{}", line.name);
        }
    }

    #[test]
    fn no_name_stands_for_two_models() {
        let mut names: Vec<&str> =
            Model::names().chain(PUBLISHED.iter().flat_map(|published| published.hub.iter().map(String::as_str))).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
