//! Training on preferences: DPO, ORPO, KTO and reward models, as TRL, Axolotl and LLaMA-Factory
//! state it. Training by rewards or from a teacher is refused.

use super::super::FrameworkError;
use super::super::stated::Stated;
use super::Tool;
use foretell_program::Preference;

/// Settings, by TRL's, Axolotl's and LLaMA-Factory's names, of training on preferences, by rewards
/// or from a teacher. Such training has further models and passes.
const OTHER_MODELS: [&str; 42] = [
    "beta",
    "max_prompt_length",
    "max_completion_length",
    "num_generations",
    "response_length",
    "num_ppo_epochs",
    "num_mini_batches",
    "reward_*",
    "ref_model*",
    "ref_adapter_name",
    "sync_ref_model",
    "precompute_ref_log_probs",
    "reference_free",
    "sft_model_path",
    "value_model*",
    "process_reward_model",
    "rl",
    "rl_*",
    "trl.*",
    "dpo_*",
    "kto_*",
    "orpo_*",
    "simpo_*",
    "cpo_*",
    "pref_*",
    "ppo_*",
    "desirable_weight",
    "undesirable_weight",
    "epsilon_high",
    "scale_rewards",
    "missing_eos_penalty",
    "cliprange*",
    "vf_coef",
    "kl_coef",
    "use_vllm",
    "vllm_*",
    "teacher_*",
    "kd_*",
    "lmbda",
    "center_rewards_coefficient",
    "disable_dropout_in_ref",
    "rpo_alpha",
];

/// Those of them that change a loss, and neither a model nor a pass.
const OF_LOSSES: [&str; 17] = [
    "beta",
    "max_prompt_length",
    "max_completion_length",
    "dpo_beta",
    "rl_beta",
    "dpo_label_smoothing",
    "dpo_use_weighting",
    "simpo_*",
    "kto_*",
    "orpo_alpha",
    "pref_beta",
    "pref_ftx",
    "desirable_weight",
    "undesirable_weight",
    "center_rewards_coefficient",
    "rpo_alpha",
    "cpo_alpha",
];

/// Losses of TRL's DPO that its other trainers lack.
const LOSSES_OF_DPO: [&str; 11] =
    ["sigmoid", "ipo", "robust", "bco_pair", "sppo_hard", "aot", "aot_pair", "discopop", "apo_zero", "apo_down", "exo_pair"];

/// Words in the names of scripts that tell what is trained on. The first five are also prefixes of
/// settings.
const OF_WORDS: [(&str, Preference); 7] = [
    ("dpo", Preference::Dpo),
    ("orpo", Preference::Orpo),
    ("kto", Preference::Kto),
    ("simpo", Preference::Orpo),
    ("cpo", Preference::Orpo),
    ("reward", Preference::Reward),
    ("rm", Preference::Reward),
];

/// Words in the names of scripts that train by rewards or from a teacher.
const BY_REWARDS: [&str; 8] = ["grpo", "ppo", "rloo", "gkd", "distill", "distillation", "xpo", "nash"];

/// Reads the preference, and whether the reference's passes are computed before the training. No
/// preference means training on texts.
pub(super) fn read(stated: &mut Stated, tool: Tool, script: Option<&str>) -> Result<(Option<Preference>, bool), FrameworkError> {
    let preference = stated_preference(stated, tool, script)?;
    if preference.is_some() {
        stated.neutral(&OF_LOSSES);
    }
    if matches!(preference, Some(Preference::Dpo | Preference::Kto)) && stated.has("ref_model") {
        stated.assume(format!("{}: the reference is taken to have the sizes of the model", stated.written("ref_model")));
        stated.drop("ref_model");
    }
    let has_reference = preference.is_some_and(Preference::has_reference);
    let is_precomputed = has_reference && stated.is_on("precompute_ref_log_probs")?;
    if is_precomputed {
        stated.assume("`precompute_ref_log_probs`: the pass over the data before the training is not part of a step");
    }
    if preference == Some(Preference::Dpo)
        && stated.peek("dpo_loss").and_then(|loss| loss.as_str()).is_some_and(|loss| LOSSES_OF_DPO.contains(&loss))
    {
        stated.neutral(&["dpo_loss"]);
    }
    // FlagEmbedding's switch. If it is off, the settings of distillation have no effect.
    let is_off = stated.peek("knowledge_distillation").is_some_and(|value| matches!(value.as_str(), Some("False" | "false")));
    if is_off {
        stated.neutral(&["knowledge_distillation", "kd_*"]);
    }
    let mut found = stated.stated_of(&OTHER_MODELS);
    found.retain(|name| !stated.is_taken(name));
    // TRL's trainer on texts alone has no such switch.
    if preference.is_none() && tool == Tool::Trl && stated.has("disable_dropout") {
        found.push("disable_dropout".into());
    }
    if preference.is_none()
        && let Some(loss) = stated.text("loss_type")?
        && !["nll", "dft", "chunked_nll"].contains(&loss.as_str())
    {
        found.push("loss_type".into());
    } else if preference.is_some() {
        stated.neutral(&["loss_type"]);
    }
    let Some(first) = found.first() else { return Ok((preference, is_precomputed)) };
    let names: Vec<String> = found.iter().map(|name| stated.own_name(name)).map(|name| format!("`{name}`")).collect();
    Err(FrameworkError::Form {
        reason: format!(
            "{}: it belongs to training by rewards, from a teacher, or on preferences of a kind that the file does not name",
            stated.written(first)
        ),
        hint: format!(
            "leave out {}, give the script that starts the job if its name says the kind (`trl dpo --config FILE`), or plan the job \
             with `foretell plan --method dpo`, `orpo`, `kto`, `reward`, `grpo` or `ppo`",
            names.join(", ")
        ),
    })
}

/// Whether the adapters' dropout stays on. Training on preferences switches it off, with these
/// exceptions: TRL with `disable_dropout` off, scripts on a plain Trainer unless `disable_dropout`
/// is on, and LLaMA-Factory for reward models.
pub(super) fn keeps_dropout(stated: &mut Stated, tool: Tool, preference: Option<Preference>) -> Result<bool, FrameworkError> {
    let Some(preference) = preference else { return Ok(true) };
    let is_disabled = stated.flag("disable_dropout")?;
    Ok(match tool {
        Tool::Trl => is_disabled == Some(false),
        Tool::Trainer => is_disabled != Some(true),
        Tool::Axolotl | Tool::Swift | Tool::OpenRlhf(_) => false,
        Tool::LlamaFactory => preference == Preference::Reward,
    })
}

/// The preference that a file or a script's name states.
fn stated_preference(stated: &mut Stated, tool: Tool, script: Option<&str>) -> Result<Option<Preference>, FrameworkError> {
    let unknown = |stated: &Stated, name: &str| {
        Err(FrameworkError::Form {
            reason: format!("{}: training by rewards or from a teacher has other models and passes", stated.written(name)),
            hint: "plan it with `foretell plan --method grpo` or `ppo`, or leave it out to plan the policy's fine-tuning alone"
                .into(),
        })
    };
    if tool == Tool::LlamaFactory
        && let Some(stage) = stated.text("stage")?
    {
        let is_orpo = stated.text("pref_loss")?.as_deref() == Some("orpo");
        return match stage.as_str() {
            "sft" | "pt" => Ok(None),
            "dpo" if is_orpo => Ok(Some(Preference::Orpo)),
            "dpo" => match stated.text("pref_loss")?.as_deref() {
                None | Some("sigmoid" | "hinge" | "ipo" | "kto_pair") => Ok(Some(Preference::Dpo)),
                Some("simpo") => {
                    stated.assume("`workload.preference` orpo: SimPO has its passes, without a reference model");
                    Ok(Some(Preference::Orpo))
                }
                Some(_) => unknown(stated, "pref_loss"),
            },
            "kto" => Ok(Some(Preference::Kto)),
            "rm" => Ok(Some(Preference::Reward)),
            _ => unknown(stated, "stage"),
        };
    }
    if let Tool::OpenRlhf(job) = tool {
        return Ok(job.preference());
    }
    if tool == Tool::Swift {
        if !script.is_some_and(|script| script.contains("rlhf")) {
            return Ok(None);
        }
        return match stated.text("rlhf_type")?.as_deref() {
            None => {
                stated.assume("`workload.preference` dpo: ms-swift's default of `rlhf_type`");
                Ok(Some(Preference::Dpo))
            }
            Some("dpo") => Ok(Some(Preference::Dpo)),
            Some("orpo") => Ok(Some(Preference::Orpo)),
            Some("cpo" | "simpo") => {
                stated.assume("`workload.preference` orpo: CPO and SimPO have its passes, without a reference model");
                Ok(Some(Preference::Orpo))
            }
            Some("kto") => Ok(Some(Preference::Kto)),
            Some("rm") => Ok(Some(Preference::Reward)),
            Some(_) => unknown(stated, "rlhf_type"),
        };
    }
    if tool == Tool::Axolotl && stated.flag("reward_model")? == Some(true) {
        return Ok(Some(Preference::Reward));
    }
    if tool == Tool::Axolotl
        && let Some(kind) = stated.text("rl")?
    {
        return match kind.as_str() {
            "dpo" | "ipo" => Ok(Some(Preference::Dpo)),
            "orpo" => Ok(Some(Preference::Orpo)),
            "simpo" => {
                stated.assume("`workload.preference` orpo: SimPO has its passes, without a reference model");
                Ok(Some(Preference::Orpo))
            }
            "kto" => Ok(Some(Preference::Kto)),
            _ => unknown(stated, "rl"),
        };
    }
    let name = script.map(|path| path.rsplit('/').next().unwrap_or(path).trim_end_matches(".py").to_ascii_lowercase());
    let words: Vec<&str> = name.iter().flat_map(|name| name.split(['_', '-', '.'])).collect();
    if let Some(word) = BY_REWARDS.into_iter().find(|word| words.contains(word)) {
        return Err(FrameworkError::Form {
            reason: format!(
                "`{}` trains by rewards or from a teacher (`{word}`), with other models and passes",
                script.expect("invariant: the word is of the script's name")
            ),
            hint: "plan it with `foretell plan --method grpo` or `ppo`".into(),
        });
    }
    // A script's name tells it; otherwise the names of settings do.
    let of_settings = |begin: &str| !stated.stated_of(&[&format!("{begin}_*")]).is_empty();
    let by_name = OF_WORDS.into_iter().find(|(word, _)| words.contains(word)).map(|found| (found, "the script's name says so"));
    let by_settings = || {
        OF_WORDS.into_iter().take(5).find(|(word, _)| of_settings(word)).map(|found| (found, "the names of its settings say so"))
    };
    // Axolotl states preferences in `rl`. Scripts with `sft` or `pretrain` in their name train on
    // texts.
    let says_other = tool == Tool::Axolotl || words.contains(&"sft") || words.contains(&"pretrain");
    if let Some(((word, preference), why)) = by_name.or_else(|| by_settings().filter(|_| !says_other)) {
        let passes = if matches!(word, "simpo" | "cpo") {
            ": its passes are those of CPO and SimPO, without a reference model"
        } else {
            ""
        };
        stated.assume(format!("`workload.preference` {}: {why}{passes}", preference.name()));
        return Ok(Some(preference));
    }
    // Losses have names that tell the preference. Scripts of other authors have other losses.
    if script.is_some() && !stated.has("beta") {
        return Ok(None);
    }
    let loss = stated.peek("loss_type").and_then(|loss| loss.as_str()).unwrap_or_default();
    let of_losses = [(&LOSSES_OF_DPO[..], Preference::Dpo), (&["kto", "apo_zero_unpaired"], Preference::Kto)];
    let found = of_losses.into_iter().find(|(losses, _)| losses.contains(&loss)).map(|(_, preference)| preference);
    if let Some(preference) = found {
        stated.assume(format!(
            "`workload.preference` {}: {} is one of its losses; give the script that starts the job if it trains otherwise",
            preference.name(),
            stated.written("loss_type")
        ));
    }
    Ok(found)
}
