//! The symbols of tables from a model of ours.

use super::architecture::table_layers;
use super::step::TableSizes;
use crate::model::Model;

impl TableSizes {
    /// The sizes of a model at a batch of samples; `None` for families without tables.
    ///
    /// `sequence` is the model's own. The rank of adapters (`r`), if there are any, is the caller's
    /// to add.
    pub fn of_model(model: &Model, batch: usize) -> Option<Self> {
        // Layers, features, heads and their features, and the sizes that families have of their
        // own.
        let sizes = |[layers, hidden, heads, features]: [usize; 4], sequence: usize, vocab: usize, own: &[(&str, usize)]| {
            // Families with more rows of learned positions say so.
            let usual =
                [("b", batch), ("s", sequence), ("p", sequence), ("h", hidden), ("n", heads), ("d", features), ("v", vocab)];
            let symbols = usual.iter().chain(own).map(|&(name, size)| (name.to_owned(), size as f64)).collect();
            TableSizes { layers, symbols }
        };
        let of_head = |own: Option<usize>, hidden: usize, heads: usize| own.unwrap_or(hidden / heads.max(1));
        Some(match model {
            Model::Llama(model) => {
                let features = of_head(model.head_dimension, model.hidden, model.heads);
                let own = [("k", model.kv_heads.unwrap_or(model.heads)), ("f", model.ffn)];
                sizes([model.layers, model.hidden, model.heads, features], model.sequence, model.vocab, &own)
            }
            Model::Gpt(model) => {
                let features = of_head(None, model.hidden, model.heads);
                let own = [("f", model.ffn.unwrap_or(4 * model.hidden))];
                sizes([model.layers, model.hidden, model.heads, features], model.sequence, model.vocab, &own)
            }
            Model::Bert(model) => {
                let features = of_head(None, model.hidden, model.heads);
                let rows = model.position_rows.unwrap_or(model.sequence);
                let own = [("f", model.ffn.unwrap_or(4 * model.hidden)), ("p", rows)];
                sizes([model.layers, model.hidden, model.heads, features], model.sequence, model.vocab, &own)
            }
            Model::Moe(model) => {
                let features = of_head(model.head_dimension, model.hidden, model.heads);
                let own = [
                    ("k", model.kv_heads.unwrap_or(model.heads)),
                    ("f", model.dense_ffn.unwrap_or(model.ffn)),
                    ("m", model.ffn),
                    ("E", model.experts),
                    ("t", model.top_k),
                ];
                sizes([model.layers, model.hidden, model.heads, features], model.sequence, model.vocab, &own)
            }
            Model::Decoder(model) => {
                let mut own = vec![("k", model.kv_heads.unwrap_or(model.heads)), ("f", model.ffn)];
                if let Some(mixtures) = &model.mixtures {
                    // Tables name the width of experts `f` where no layer is dense.
                    let dense = if mixtures.first > 0 { model.ffn } else { mixtures.ffn };
                    own = vec![own[0], ("f", dense), ("m", mixtures.ffn), ("E", mixtures.experts), ("t", mixtures.top_k)];
                    own.extend(mixtures.shared_ffn.map(|shared| ("e", shared)));
                }
                own.extend(model.window.map(|window| ("w", window)));
                // OPT's table has rows before the first position, which `p` leaves out.
                own.extend(model.position_rows.map(|rows| ("p", rows.saturating_sub(model.first_position))));
                own.extend(model.rotary_part.map(|features| ("x", features)));
                own.extend(model.key_value_rank.map(|rank| ("z", rank)));
                own.push(("y", model.value_dimension.unwrap_or_else(|| model.head_features())));
                if let Some(linear) = &model.linear {
                    own.extend([("i", linear.key_heads), ("j", linear.heads)]);
                    own.extend([("a", linear.key_dimension), ("l", linear.head_dimension)]);
                }
                sizes([table_layers(model), model.hidden, model.heads, model.head_features()], model.sequence, model.vocab, &own)
            }
            Model::T5(model) => {
                let features = of_head(model.head_dimension, model.hidden, model.heads);
                let own = [("f", model.ffn), ("u", model.target_sequence)];
                sizes([model.layers, model.hidden, model.heads, features], model.source_sequence, model.vocab, &own)
            }
            Model::Whisper(model) => {
                let features = of_head(None, model.hidden, model.heads);
                let rows = model.target_rows.unwrap_or(model.target_sequence);
                let own = [("f", model.ffn), ("u", model.target_sequence), ("p", rows)];
                sizes([model.layers, model.hidden, model.heads, features], 0, model.vocab, &own)
            }
            Model::Vit(model) => {
                let features = of_head(None, model.hidden, model.heads);
                let own = [("f", model.ffn.unwrap_or(4 * model.hidden))];
                sizes([model.layers, model.hidden, model.heads, features], 0, 0, &own)
            }
            _ => return None,
        })
    }

    /// The sizes with another symbol.
    #[must_use]
    pub fn with(mut self, symbol: &str, size: usize) -> Self {
        self.symbols.insert(symbol.into(), size as f64);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    #[test]
    fn every_table_expands_and_releases_all_but_gradients() {
        use crate::operator_tables::{OperatorTable, StepEvent};
        let all = [
            ("b", 2),
            ("u", 64),
            ("s", 256),
            ("h", 512),
            ("n", 8),
            ("k", 4),
            ("d", 64),
            ("f", 1024),
            ("v", 3000),
            ("r", 8),
            ("E", 8),
            ("t", 2),
            ("m", 256),
            ("e", 256),
            ("w", 128),
            ("p", 512),
            ("c", 2),
            ("q", 128),
            ("x", 32),
            ("y", 64),
            ("z", 128),
            ("i", 4),
            ("j", 16),
            ("a", 64),
            ("l", 64),
        ];
        let symbols: BTreeMap<String, f64> = all.into_iter().map(|(name, size)| (name.to_owned(), f64::from(size))).collect();
        let keys = OperatorTable::library_keys();
        assert!(keys.len() > 150, "{} tables", keys.len());
        for key in keys {
            let wanted: Vec<(&str, &str)> = key.iter().map(|(name, value)| (*name, *value)).collect();
            let table = OperatorTable::library(&wanted).expect("is read").expect("is there");
            let sizes = TableSizes { layers: 5, symbols: symbols.clone() };
            let (mut live, mut gradients) = (BTreeMap::new(), 0);
            let expanded = table.expand(&sizes, |event| match event {
                StepEvent::Allocate { id, bytes } => {
                    live.insert(id, bytes);
                }
                StepEvent::Release { id } => {
                    live.remove(&id).expect("is allocated");
                }
                StepEvent::Gradient { id, parameter } => {
                    gradients += 1;
                    let parameter = &table.parameters[parameter];
                    let elements = parameter.own_elements(&table.values(&sizes).expect("are given"));
                    assert_eq!(live[&id], elements * parameter.element.bytes(), "{key:?}: {parameter:?}");
                }
                _ => {}
            });
            assert_eq!(expanded, Ok(()), "{key:?}");
            assert!(gradients > 0, "{key:?}");
        }
    }
}
