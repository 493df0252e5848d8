//! Changes of the model, the method or the devices with which a job would fit; each is planned.
//!
//! Micro-batches, recomputation and sharding are chosen by the search; these changes only the user
//! may choose. The cheapest in time or quality come first.

use crate::choices::{Choices, OptimizerName};
use crate::explain::{LAYOUTS_TO_CHOOSE_FROM, risk, safest};
use crate::failure::Failure;
use crate::method::{Attention, Loss, Method, Reference};
use crate::usual_stack::Trainer;
use foretell_planner::{Fixed, PlannerError};
use foretell_program::{Offload, Preference, Profile, Recompute};
use foretell_topologies::Topology;
use foretell_units::{Bytes, Seconds};

/// The most changes of the job that are offered.
const MOST_OFFERED: usize = 6;

/// The most other device counts and kinds that are offered in addition.
const MOST_DEVICES_OFFERED: usize = 3;

/// Offered kinds of GPU, in order of their memory.
const LARGER_KINDS: [&str; 6] = ["rtx-4090", "rtx-a6000", "a100-sxm-80g", "h100-sxm-80g", "h200", "b200"];

/// Offered numbers of devices of a node.
const DEVICES_OFFERED: [usize; 3] = [2, 4, 8];

/// The stack that can offload on one device as well.
const DEEPSPEED: &str = "hf-deepspeed";

/// The shortest sequence that is offered, in tokens.
const SHORTEST: usize = 512;

/// What a change is about. Of the sequence lengths and of the device counts, only the first that
/// fits is offered.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Subject {
    /// What is trained and how: all changes that fit are offered.
    Job,
    Sequence,
    /// The number of devices.
    Devices,
    /// The kind of the devices.
    Kind,
}

/// A change with which a job fits.
struct Offer {
    subject: Subject,
    options: String,
    step: Seconds,
    memory: Bytes,
    chance_of_running_out: Option<f64>,
}

/// Changes with which a fine-tuning job that does not fit would fit; `None` if there is none, or if
/// the job is no fine-tuning.
pub fn in_words(choices: &Choices, profile: Option<&Profile>) -> Result<Option<String>, Failure> {
    if !choices.method.is_fine_tuning() {
        return Ok(None);
    }
    // The batch is fixed first: otherwise a change of the number of devices would change it.
    let batch = choices.setting(Trainer::Framework)?.base.global_batch;
    let choices = &Choices { global_batch: Some(batch), ..choices.clone() };
    let mut offers: Vec<Offer> = Vec::new();
    for (changes, most) in [(changes_of_job(choices)?, MOST_OFFERED), (changes_of_devices(choices)?, MOST_DEVICES_OFFERED)] {
        let before = offers.len();
        for change in changes {
            let is_answered = offers.iter().any(|offer| offer.subject != Subject::Job && offer.subject == change.subject);
            if offers.len() - before < most && (!is_answered || change.subject == Subject::Kind) {
                offers.extend(offer(&change, profile)?);
            }
        }
    }
    let offered = |Offer { options, step, memory, chance_of_running_out, .. }: &Offer| {
        let risk = risk(*chance_of_running_out).map(|risk| format!(", {risk}")).unwrap_or_default();
        format!("`{options}` ({memory}, {step} a step{risk})")
    };
    let offered: Vec<String> = offers.iter().map(offered).collect();
    Ok((!offered.is_empty()).then(|| offered.join(", or ")))
}

/// A changed job, and the options that change it.
struct Change {
    subject: Subject,
    options: String,
    choices: Choices,
}

/// All changes of what is trained and how, in order.
fn changes_of_job(choices: &Choices) -> Result<Vec<Change>, Failure> {
    let mut changes = Vec::new();
    let mut add = |options: &str, change: &dyn Fn(&mut Choices)| {
        let mut choices = choices.clone();
        change(&mut choices);
        let subject = if options.starts_with("--sequence") { Subject::Sequence } else { Subject::Job };
        changes.push(Change { subject, options: options.into(), choices });
    };
    // A value that `--fix` holds may be the reason why the job does not fit.
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
    let has_reference = method.and_then(Method::preference).is_some_and(Preference::has_reference);
    if has_reference && choices.method.adapter.is_none() && choices.method.reference.is_none() {
        add("--reference precomputed", &|choices| choices.method.reference = Some(Reference::Precomputed));
    }
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
    // transformers 5 keeps experts in tensors that no quantiser reads; before it, each expert is a
    // layer of its own.
    let has_narrow_experts = setting.base.workload.base_bits.is_some() && setting.model.model.experts().is_some();
    if has_narrow_experts && choices.stack.as_deref().is_none_or(|stack| stack == "hf-trainer") {
        add("--stack hf-trainer-4.48", &|choices| choices.stack = Some("hf-trainer-4.48".into()));
    }
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
    Ok(changes)
}

/// Changes of the devices: more of them, then kinds with more memory.
fn changes_of_devices(choices: &Choices) -> Result<Vec<Change>, Failure> {
    let topology = choices.setting(Trainer::Framework)?.topology;
    let ([group], [kind]) = (topology.node_groups(), topology.device_kinds()) else { return Ok(Vec::new()) };
    let of = |subject: Subject, topology: String| {
        let choices = Choices { topology: topology.clone(), nodes: None, ..choices.clone() };
        Change { subject, options: format!("--topology {topology}"), choices }
    };
    let mut changes = Vec::new();
    if group.count == 1 {
        let more = DEVICES_OFFERED.into_iter().filter(|&devices| devices > group.devices);
        changes.extend(more.map(|devices| of(Subject::Devices, format!("{devices}x{}", kind.name))));
    }
    changes.extend([2 * group.count, 4 * group.count].map(|nodes| {
        let choices = Choices { nodes: Some(nodes), ..choices.clone() };
        Change { subject: Subject::Devices, options: format!("--nodes {nodes}"), choices }
    }));
    for name in LARGER_KINDS {
        let text = format!("{}x{}x{name}", group.count, group.devices).replacen("1x", "", usize::from(group.count == 1));
        let is_larger =
            Topology::said(&text).and_then(Result::ok).is_some_and(|said| said.topology.device_kinds()[0].memory > kind.memory);
        if is_larger {
            changes.push(of(Subject::Kind, text));
        }
    }
    Ok(changes)
}

/// The offer of a change; `None` if the changed job does not fit or cannot be planned.
fn offer(change: &Change, profile: Option<&Profile>) -> Result<Option<Offer>, Failure> {
    // The cluster may have only one node, and the stack may lack an option.
    let Ok(mut setting) = change.choices.setting(Trainer::Framework) else { return Ok(None) };
    let planned = match change.choices.search(&mut setting, profile, LAYOUTS_TO_CHOOSE_FROM) {
        Ok(planned) => planned,
        Err(Failure::Unplanned(PlannerError::OutOfMemory { .. } | PlannerError::OutOfTime { .. }) | Failure::Input(_)) => {
            return Ok(None);
        }
        Err(error) => return Err(error),
    };
    Ok(safest(&planned.candidates).map(|best| Offer {
        subject: change.subject,
        options: change.options.clone(),
        step: best.prediction.step_seconds,
        memory: best.prediction.peak_memory_bytes.iter().copied().max().unwrap_or_default(),
        chance_of_running_out: best.prediction.chance_of_running_out,
    }))
}
