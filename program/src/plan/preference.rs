//! Training on preferences: what a sample is, and what runs beside the model.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// A method that trains on which of two answers people prefer, as TRL's trainers run it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Preference {
    /// Direct preference optimisation (Rafailov et al. 2023): both answers of a pair go through the
    /// model and through a frozen reference of it (`DPOTrainer`).
    Dpo,
    /// Odds ratio preference optimisation (Hong et al. 2024): both answers, and no reference
    /// (`ORPOTrainer`).
    Orpo,
    /// Kahneman-Tversky optimisation (Ethayarajh et al. 2024): one answer with gradients. The
    /// answer of another sample also goes through the model without gradients, and both go through
    /// a frozen reference (`KTOTrainer`).
    Kto,
    /// A reward model (Ouyang et al. 2022): both answers, with a head that gives one number in
    /// place of the head over the vocabulary, and no reference (`RewardTrainer`).
    Reward,
}

impl Preference {
    /// The name in plan files.
    pub const fn name(self) -> &'static str {
        match self {
            Preference::Dpo => "dpo",
            Preference::Orpo => "orpo",
            Preference::Kto => "kto",
            Preference::Reward => "reward",
        }
    }

    /// The number of sequences of a sample that the model is trained on.
    pub const fn sequences(self) -> usize {
        match self {
            Preference::Dpo | Preference::Orpo | Preference::Reward => 2,
            Preference::Kto => 1,
        }
    }

    /// The numbers of forward passes without gradients, each over as many sequences as the model's
    /// own pass: of the model, and of a reference.
    pub const fn passes_without_gradients(self) -> [usize; 2] {
        match self {
            Preference::Dpo => [0, 1],
            Preference::Orpo | Preference::Reward => [0, 0],
            // The other sample's answer through the model, both answers through the reference.
            Preference::Kto => [1, 2],
        }
    }

    /// Whether training needs a frozen reference: a copy of the model or, with adapters, the model
    /// without them.
    pub const fn has_reference(self) -> bool {
        !matches!(self, Preference::Orpo | Preference::Reward)
    }

    /// Whether the model has a head over the vocabulary.
    pub const fn has_vocabulary(self) -> bool {
        !matches!(self, Preference::Reward)
    }
}
