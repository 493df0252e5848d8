//! Published models that people train further, in the zoo by the configuration that Hugging Face's
//! hub has of each (`published.jsonl`: a line each). Configurations are read as a user's own
//! `config.json` is. Sequences are at most 4,096 positions, whatever a model could take.

use crate::hugging_face::from_hugging_face;
use crate::model::Model;
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
    /// Names on the hub other than the zoo's, in lower case, without their owner and without endings
    /// such as `-instruct`.
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
            Model::names().chain(PUBLISHED.iter().flat_map(|one| one.hub.iter().map(String::as_str))).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
    }
}
