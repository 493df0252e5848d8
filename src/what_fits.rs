//! What would make a job fit: changes of what is trained and how, each planned.
//!
//! Micro-batches, recomputation and sharding are the search's own; these are the choices that only
//! the user may make. The cheapest in time or quality come first.

use crate::choices::{Choices, OptimizerName};
use crate::failure::Failure;
use crate::method::{Attention, Loss, Method};
use crate::usual_stack::Trainer;
use foretell_planner::{Fixed, PlannerError};
use foretell_program::{Offload, Profile, Recompute};
use foretell_units::{Bytes, Seconds};

/// Most changes that are offered.
const MOST_OFFERED: usize = 6;

/// The stack that offloads on one device, too.
const DEEPSPEED: &str = "hf-deepspeed";

/// Shortest sequence that is offered.
const SHORTEST: usize = 512;

/// A change with which a job fits.
struct Offer {
    options: String,
    step: Seconds,
    memory: Bytes,
}

/// Changes with which a fine-tuning job that does not fit would, as one hint; `None` if there is
/// none, or if the job is another.
pub fn hint(choices: &Choices, profile: Option<&Profile>) -> Result<Option<String>, Failure> {
    if !choices.method.is_fine_tuning() {
        return Ok(None);
    }
    let mut offers = Vec::new();
    let mut answered: Vec<&str> = Vec::new();
    for change in changes(choices)? {
        // Of ever smaller values the first that fits is enough.
        let option = change.options.split(' ').next().unwrap_or_default();
        let is_of_sizes = ["--sequence", "--nodes"].iter().find(|sizes| **sizes == option);
        if is_of_sizes.is_some_and(|sizes| answered.contains(sizes)) {
            continue;
        }
        if let Some(offer) = offer(&change, profile)? {
            offers.push(offer);
            answered.extend(is_of_sizes);
        }
        if offers.len() == MOST_OFFERED {
            break;
        }
    }
    let offered = |Offer { options, step, memory }: &Offer| format!("`{options}` ({memory}, {step} a step)");
    let offered: Vec<String> = offers.iter().map(offered).collect();
    Ok((!offered.is_empty()).then(|| format!("it fits with {}", offered.join(", or "))))
}

/// A changed job, and the options that change it.
struct Change {
    options: String,
    choices: Choices,
}

/// All changes, in order.
fn changes(choices: &Choices) -> Result<Vec<Change>, Failure> {
    let mut changes = Vec::new();
    let mut add = |options: &str, change: &dyn Fn(&mut Choices)| {
        let mut choices = choices.clone();
        change(&mut choices);
        changes.push(Change { options: options.into(), choices });
    };
    // What `--fix` holds may be what does not fit.
    let Fixed { zero, micro_batch, recompute, .. } = &choices.fix;
    let shards = |choices: &mut Choices| choices.fix.zero = Some(3);
    let recomputes = |choices: &mut Choices| choices.fix.recompute = Some(Recompute::Full);
    let is_unsharded = zero.is_some_and(|zero| zero < 3);
    let keeps = recompute.as_ref().is_some_and(|recompute| *recompute != Recompute::Full);
    if keeps {
        add("--fix recompute=full", &recomputes);
    }
    if micro_batch.is_some_and(|size| size > 1) {
        add("--fix micro_batch=1", &|choices| choices.fix.micro_batch = Some(1));
    }
    if is_unsharded {
        add("--fix zero=3", &shards);
    }
    if is_unsharded && keeps {
        add("--fix zero=3,recompute=full", &|choices| {
            shards(choices);
            recomputes(choices);
        });
    }
    let (method, has_liger) = (choices.method.method, choices.method.loss == Some(Loss::Liger));
    use OptimizerName::{Adafactor, AdamwEightBit, PagedAdamwEightBit};
    let has_small_states = matches!(choices.optimizer, Some(AdamwEightBit | PagedAdamwEightBit | Adafactor));
    if choices.method.attention == Some(Attention::Eager) {
        add("--attention flash", &|choices| choices.method.attention = Some(Attention::Flash));
    }
    let is_on_preferences = method.and_then(Method::preference).is_some();
    if is_on_preferences && choices.method.adapter.is_none() {
        add("--adapter rank=16", &|choices| choices.method.adapter = "rank=16".parse().ok());
        add("--adapter rank=16 --base-bits 4", &|choices| {
            choices.method.adapter = "rank=16".parse().ok();
            choices.method.base_bits = Some(4);
        });
    } else if is_on_preferences && choices.method.base_bits.is_none() {
        add("--base-bits 4", &|choices| choices.method.base_bits = Some(4));
    }
    if !has_liger && !is_on_preferences {
        add("--loss chunked", &|choices| choices.method.loss = Some(Loss::Chunked));
        add("--loss liger", &|choices| choices.method.loss = Some(Loss::Liger));
    }
    if method == Some(Method::Full) {
        if !has_small_states {
            add("--optimizer adamw-8bit", &|choices| choices.optimizer = Some(AdamwEightBit));
            add("--optimizer adafactor", &|choices| choices.optimizer = Some(Adafactor));
            add("--optimizer adamw-8bit --loss liger", &|choices| {
                choices.optimizer = Some(AdamwEightBit);
                choices.method.loss = Some(Loss::Liger);
            });
        }
        add("--method lora", &|choices| choices.method.method = Some(Method::Lora));
        add("--method lora --loss liger", &|choices| {
            choices.method.method = Some(Method::Lora);
            choices.method.loss = Some(Loss::Liger);
        });
    }
    if choices.fix.offload.is_none() {
        add("--fix offload=state", &|choices| choices.fix.offload = Some(Offload::State));
        if choices.stack.as_deref() != Some(DEEPSPEED) {
            add("--stack hf-deepspeed --fix offload=state", &|choices| {
                choices.stack = Some(DEEPSPEED.into());
                choices.fix.offload = Some(Offload::State);
            });
        }
    }
    if method != Some(Method::Qlora) && !is_on_preferences {
        add("--method qlora", &|choices| choices.method.method = Some(Method::Qlora));
    }
    let setting = choices.setting(Trainer::Framework)?;
    // With one sample for each device gradients need not be accumulated.
    let devices = setting.topology.device_count();
    if setting.base.global_batch > devices {
        add(&format!("--global-batch {devices}"), &move |choices| choices.global_batch = Some(devices));
    }
    if let Some((length, _)) = setting.model.model.sample().tokens() {
        let shorter = std::iter::successors(Some(length / 2), |length| Some(length / 2));
        for shorter in shorter.take_while(|length| *length >= SHORTEST) {
            add(&format!("--sequence {shorter}"), &move |choices| choices.sequence = Some(shorter));
        }
    }
    let nodes = setting.topology.node_count();
    if setting.topology.node_groups().len() == 1 {
        for nodes in [2 * nodes, 4 * nodes] {
            add(&format!("--nodes {nodes}"), &move |choices| choices.nodes = Some(nodes));
        }
    }
    Ok(changes)
}

/// The offer of a change; `None` if the job does not fit with it either, or cannot be planned so.
fn offer(change: &Change, profile: Option<&Profile>) -> Result<Option<Offer>, Failure> {
    // A cluster may have no second node, and a stack not every option.
    let Ok(mut setting) = change.choices.setting(Trainer::Framework) else { return Ok(None) };
    let planned = match change.choices.search(&mut setting, profile, 1) {
        Ok(planned) => planned,
        Err(Failure::Unplanned(PlannerError::OutOfMemory { .. } | PlannerError::OutOfTime { .. }) | Failure::Input(_)) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    Ok(planned.candidates.first().map(|best| Offer {
        options: change.options.clone(),
        step: best.prediction.step_seconds,
        memory: best.prediction.peak_memory_bytes.iter().copied().max().unwrap_or_default(),
    }))
}
