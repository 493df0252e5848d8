//! The trained parameters of a fine-tuning job: all, or adapters next to frozen weights. TRL,
//! Axolotl and LLaMA-Factory state them with peft's and bitsandbytes' names.

use super::super::FrameworkError;
use super::super::stated::Stated;
use super::Tool;
use foretell_program::{Lora, NamePatterns, Plan};
use serde_json::{Value, json};

/// Other names of the same settings in the files of the three tools.
const RENAMED: [(&str, &str); 14] = [
    ("lora_rank", "lora_r"),
    ("lora_target", "lora_target_modules"),
    ("target_modules", "lora_target_modules"),
    ("lora_trainable", "lora_target_modules"),
    ("additional_target", "lora_modules_to_save"),
    ("modules_to_save", "lora_modules_to_save"),
    ("use_dora", "peft_use_dora"),
    ("lora_use_dora", "peft_use_dora"),
    ("bnb_4bit", "load_in_4bit"),
    ("load_4bit", "load_in_4bit"),
    ("load_8bit", "load_in_8bit"),
    ("use_4bit_quantization", "load_in_4bit"),
    ("use_8bit_quantization", "load_in_8bit"),
    ("use_peft_lora", "use_lora"),
];

/// Settings that change the initial values or the scale of adapters, or the constants of four-bit
/// weights.
const NEUTRAL: [&str; 28] = [
    "lora_alpha",
    "lora_r",
    "lora_dropout",
    "lora_target_modules",
    "lora_target_linear",
    "lora_modules_to_save",
    "lora_bias",
    "lora_fan_in_fan_out",
    "lora_model_dir",
    "lora_task_type",
    "lora_name",
    "loraplus_*",
    "lora_namespan_exclude",
    "num_lora_modules",
    "adapter_name_or_path",
    "create_new_adapter",
    "use_rslora",
    "peft_use_rslora",
    "pissa_*",
    "bnb_4bit_*",
    "use_bnb_nested_quant",
    "bnb_config_kwargs*",
    "quantization_type",
    "double_quantization",
    "quantization_method",
    "use_nested_quant",
    "double_quant",
    "quant_type",
];

/// Reads the method of training.
pub(super) fn read(stated: &mut Stated, tool: Tool, plan: &mut Plan) -> Result<(), FrameworkError> {
    // In InternVL a rank of 0 means no adapters.
    stated.usual("use_llm_lora", &json!(0));
    stated.usual("use_llm_lora", &json!("0"));
    if !stated.is_taken("use_llm_lora") {
        stated.rename("use_llm_lora", "lora_r")?;
    }
    for (older, newer) in RENAMED {
        stated.rename(older, newer)?;
    }
    // Names in the scripts of Chinese-LLaMA and of QLoRA.
    if stated.has("lora_r") && !stated.has("lora_target_modules") {
        stated.rename("trainable", "lora_target_modules")?;
    }
    read_switches(stated)?;
    stated.refuse_with(
        &["gptq", "bnb_config_kwargs.load_in_8bit"],
        "frozen weights of other formats than bitsandbytes' 4 and 8 bits are not planned",
        "write `load_in_4bit: true` (QLoRA) or `load_in_8bit: true` in its place, or leave it out for frozen weights of 16 bits",
    )?;
    stated.refuse(&["lora_on_cpu"], "adapters lie in device memory in a plan")?;
    stated.refuse(
        &["peft_use_dora", "relora*", "use_badam", "lora_layers_to_transform", "lora_target_parameters"],
        "of adapters, plain LoRA and QLoRA are planned",
    )?;
    let named = bits_of_name(stated);
    let bits = frozen_bits(stated)?.or(named);
    if !has_adapters(stated, tool, bits.is_some())? {
        if let (Some(_), Some(model)) = (named, stated.peek("model_name_or_path").and_then(Value::as_str)) {
            return Err(FrameworkError::Form {
                reason: format!("{model}: its name says that its weights are quantised, and no adapters are stated"),
                hint: "name the model of 16 bits, or state adapters (`--lora_r 8`)".into(),
            });
        }
        if let Some(bits) = bits {
            return Err(FrameworkError::Form {
                reason: format!("weights of {bits} bits without adapters cannot be trained"),
                hint: format!(
                    "add `adapter: qlora` (Axolotl), `use_peft: true` (TRL), `finetuning_type: lora` (LLaMA-Factory) or `--lora_r 8` (a script), or \
                     leave out the {bits} bits"
                ),
            });
        }
        refuse_other_words(stated)?;
        stated.neutral(&NEUTRAL);
        return Ok(());
    }
    let model = stated.peek("model_name_or_path").and_then(Value::as_str).unwrap_or_default().to_owned();
    let adapters = read_adapters(stated, tool, &model)?;
    plan.training.lora = Some(adapters);
    plan.workload.adapter_dropout = stated.number("lora_dropout")?.map_or(tool == Tool::Trl, |rate| rate > 0.0);
    plan.workload.base_bits = bits;
    stated.noted(&["lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel"]);
    stated.neutral(&NEUTRAL);
    Ok(())
}

/// Refuses unknown settings whose values suggest that adapters are trained.
fn refuse_other_words(stated: &Stated) -> Result<(), FrameworkError> {
    let may_say =
        |name: &&String| ["tun", "train", "peft", "adapt", "method", "mode", "type"].iter().any(|part| name.contains(part));
    match stated.with_value(&["lora", "qlora"]).iter().find(may_say) {
        None => Ok(()),
        Some(name) => Err(FrameworkError::Form {
            reason: format!("{}: it may say that adapters are trained, and its name is not known", stated.written(name)),
            hint: "state the adapters (`--lora_r 8`, with `--lora_alpha` and `--lora_target_modules`), or leave it out".into(),
        }),
    }
}

/// Reads switches for adapters and bits in scripts of other authors.
fn read_switches(stated: &mut Stated) -> Result<(), FrameworkError> {
    stated.refuse_with(
        &["low_rank_training"],
        "the script chooses adapters by itself, and their rank and targets are not stated",
        "write them out in its place: LongLoRA's are `--lora_r 8 --lora_alpha 16 --lora_target_modules q_proj,k_proj,v_proj,o_proj`, with \
         `--lora_modules_to_save embed,norm`",
    )?;
    for name in ["bits", "quant_bit"] {
        let is_wide = |value: &Value| ["16", "32"].iter().any(|bits| value == bits) || value == 16 || value == 32;
        if stated.peek(name).is_some_and(is_wide) {
            stated.drop(name);
        }
        stated.rename(name, "quantization_bit")?;
    }
    if stated.is_on("q_lora")? {
        stated.provide("load_in_4bit", true.into());
    }
    if !stated.has("lora_r") {
        stated.refuse_with(
            &OF_OTHERS,
            "the script trains adapters, whose rank is its own default",
            "state the rank that it takes: `--lora_r 8`, with `--lora_alpha` and `--lora_target_modules`",
        )?;
    }
    Ok(())
}

/// The bits of quantised frozen weights.
fn frozen_bits(stated: &mut Stated) -> Result<Option<u8>, FrameworkError> {
    let has_four = stated.is_on("load_in_4bit")?;
    let has_eight = stated.is_on("load_in_8bit")?;
    match stated.count("quantization_bit")? {
        None if has_four || stated.text("adapter")?.as_deref() == Some("qlora") => Ok(Some(4)),
        None => Ok(has_eight.then_some(8)),
        Some(4) => Ok(Some(4)),
        Some(8) => Ok(Some(8)),
        Some(_) => Err(FrameworkError::Form {
            reason: format!("{}: frozen weights of 4, 8 or 16 bits are planned", stated.written("quantization_bit")),
            hint: "write `quantization_bit: 4` or `8`, or leave it out for 16 bits".into(),
        }),
    }
}

/// The bits of a published model whose name says that it is quantised.
fn bits_of_name(stated: &mut Stated) -> Option<u8> {
    let name = stated.peek("model_name_or_path")?.as_str()?.to_ascii_lowercase();
    let kind = ["gptq", "awq"].into_iter().find(|kind| name.split(['-', '_', '/']).any(|word| word == *kind))?;
    let bits = if name.contains("int8") || name.contains("8bit") { 8 } else { 4 };
    stated.assume(format!(
        "`workload.base_bits` {bits}: the model's name says {kind}; its weights are planned as bitsandbytes has them"
    ));
    Some(bits)
}

/// Whether adapters are trained next to frozen weights.
fn has_adapters(stated: &mut Stated, tool: Tool, is_quantised: bool) -> Result<bool, FrameworkError> {
    match stated.text("adapter")?.as_deref() {
        None => {}
        Some("lora" | "qlora") => return Ok(true),
        Some(_) => return Err(stated.unknown("adapter", "adapters: lora, qlora")),
    }
    match stated.text("finetuning_type")?.as_deref() {
        None if tool == Tool::LlamaFactory => {
            stated.assume("`training.lora`: LLaMA-Factory's default of `finetuning_type` is lora");
            return Ok(true);
        }
        None | Some("full") => {}
        Some("lora") => return Ok(true),
        Some(_) => return Err(stated.unknown("finetuning_type", "types: full, lora")),
    }
    // TRL loads four-bit weights only with adapters. The switches are those of other authors'
    // scripts: without a stated rank, theirs is not known.
    let has_rank = stated.has("lora_r");
    let mut is_switched_on = stated.is_on("use_peft")? || (tool == Tool::Trl && is_quantised && has_rank);
    for switch in OF_OTHERS {
        is_switched_on |= has_rank && stated.is_on(switch)?;
    }
    if is_switched_on {
        return Ok(true);
    }
    // Some scripts of other authors (FastChat's `train_lora.py`) have no switch: a rank means
    // adapters.
    let says_neither = ["use_peft"].iter().chain(&OF_OTHERS).all(|switch| stated.peek(switch).is_none());
    let is_meant =
        tool == Tool::Trainer && says_neither && stated.stated_of(&["lora_r"]).len() == 1 && !stated.is_taken("lora_r");
    if is_meant {
        stated.assume(format!(
            "{} is taken to mean adapters; add `--use_lora False` to train all parameters",
            stated.written("lora_r")
        ));
    }
    Ok(is_meant)
}

/// Names of the switch for adapters in scripts of other authors.
const OF_OTHERS: [&str; 2] = ["use_lora", "lora_enable"];

/// The pattern of the parameters of a model's vision tower.
const VISION: &str = "vision*";

/// Settings that decide whether the vision tower is trained, with the value that freezes it.
const FREEZES_VISION: [(&str, bool); 5] = [
    ("freeze_vision_tower", true),
    ("freeze_vision_modules", true),
    ("freeze_vit", true),
    ("tune_mm_vision", false),
    ("tune_vision_tower", false),
];

/// Settings that decide whether the layers between vision tower and text model are trained. They
/// are few, and are frozen together with the tower or not at all.
const OF_PROJECTOR: [&str; 7] = [
    "freeze_merger",
    "freeze_mlp",
    "freeze_multi_modal_projector",
    "tune_mm_mlp",
    "tune_mm_mlp_adapter",
    "tune_mm_projector",
    "freeze_aligner",
];

/// Settings that freeze the language model, with the value that does.
const FREEZES_TEXT: [(&str, bool); 5] = [
    ("freeze_language_model", true),
    ("freeze_llm", true),
    ("freeze_backbone", true),
    ("tune_mm_llm", false),
    ("tune_language_model", false),
];

/// Reads which parts of a model of images and text are trained.
pub(super) fn read_frozen(stated: &mut Stated, tool: Tool, plan: &mut Plan) -> Result<(), FrameworkError> {
    // Next to adapters everything else is frozen. InternVL's backbone is the vision tower.
    let has_adapters = plan.training.lora.is_some();
    let is_of_vision = |name: &str| name == "freeze_backbone" && stated.peek("freeze_llm").is_some();
    let of_text: Vec<(&str, bool)> = FREEZES_TEXT.into_iter().filter(|(name, _)| !is_of_vision(name)).collect();
    for (name, freezing) in of_text {
        if stated.flag(name)? == Some(freezing) && !has_adapters {
            return Err(stated.frozen_text(name));
        }
    }
    // LLaMA-Factory freezes the tower and the projector by default.
    let sees = ["image_max_pixels", "video_max_pixels", "image_resolution", "freeze_multi_modal_projector", "media_dir"];
    let mut is_usual = tool == Tool::LlamaFactory && sees.iter().any(|name| stated.peek(name).is_some());
    // So does ms-swift. Its settings of images tell that the model has a vision tower.
    let of_swift = ["max_pixels", "vit_lr", "aligner_lr", "vit_gradient_checkpointing", "freeze_aligner"];
    is_usual |= tool == Tool::Swift && of_swift.iter().any(|name| stated.peek(name).is_some());
    let mut freezes = is_usual.then_some(true);
    freezes = stated.flag("freeze_backbone")?.or(freezes);
    for (name, freezing) in FREEZES_VISION {
        if let Some(value) = stated.flag(name)? {
            freezes = Some(value == freezing);
        }
    }
    if has_adapters && freezes == Some(false) && tool == Tool::Trainer {
        return Err(FrameworkError::Form {
            reason: "adapters beside a part that sees images and is trained whole: no plan has both".into(),
            hint: "freeze that part (`--freeze_vision_tower True`) to plan the adapters, or leave out the adapters".into(),
        });
    }
    for name in OF_PROJECTOR {
        if stated.flag(name)?.is_some() {
            stated.in_part(name);
        }
    }
    if freezes == Some(true) {
        plan.training.frozen = NamePatterns::from_iter([VISION]);
        stated.assume("`training.frozen` vision*: the part that sees images is not trained");
    }
    Ok(())
}

/// Peft's default targets of adapters, and the family that has them
/// (`TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING` in `peft/utils/constants.py`).
fn usual_targets(model: &str) -> (&'static [&'static str], &'static str) {
    const OF_FAMILIES: [(&[&str], &[&str], &str); 4] = [
        (&["falcon"], &["query_key_value"], "Falcon"),
        (&["neox", "pythia", "dolly"], &["query_key_value"], "GPT-NeoX"),
        (&["bloom"], &["query_key_value"], "BLOOM"),
        (&["gpt2"], &["c_attn"], "GPT-2"),
    ];
    let name = model.to_ascii_lowercase();
    let name = name.trim_end_matches('/').rsplit('/').next().unwrap_or_default();
    // These later Falcons have other layers, those of Llama or of Mamba.
    let is_later = ["falcon3", "falcon-h", "falcon-mamba", "falcon-e"].iter().any(|part| name.contains(part));
    let found = OF_FAMILIES.iter().find(|(parts, ..)| parts.iter().any(|part| name.contains(part)));
    match found.filter(|_| !is_later) {
        Some((_, targets, family)) => (targets, family),
        None => (&["q_proj", "v_proj"], "Llama"),
    }
}

/// The layers of our decoders that a module of some framework corresponds to: some frameworks keep
/// the weights of queries, keys and values in one.
fn parts_of(module: &str) -> Vec<&str> {
    match module {
        "query_key_value" | "qkv_proj" | "W_pack" => vec!["q_proj", "k_proj", "v_proj"],
        "gate_up_proj" => vec!["gate_proj", "up_proj"],
        other => vec![other],
    }
}

fn read_adapters(stated: &mut Stated, tool: Tool, model: &str) -> Result<Lora, FrameworkError> {
    let of_peft = Lora::default();
    let usual_rank = if tool == Tool::Trl { Lora::USUAL_RANK } else { of_peft.rank };
    let stated_rank = stated.size("lora_r")?;
    let rank = stated_rank.unwrap_or(usual_rank);
    let alpha = stated.size("lora_alpha")?.unwrap_or(match tool {
        Tool::Trl => Lora::usual_alpha(Lora::USUAL_RANK),
        Tool::LlamaFactory => Lora::usual_alpha(rank),
        Tool::Axolotl | Tool::Trainer | Tool::Swift | Tool::OpenRlhf(_) => of_peft.alpha,
    });
    if stated_rank.is_none() {
        stated.assume(format!("`training.lora.rank` {rank}: the default of {}", tool.name()));
    }
    let targets = read_names(stated, "lora_target_modules")?;
    let targets: Vec<&str> = targets.iter().map(String::as_str).collect();
    // A number of modules, counted from the end; -1 means all.
    let is_all = targets.is_empty() && stated.peek("num_lora_modules").is_some_and(|count| count == "-1" || count == -1);
    if !is_all && stated.peek("num_lora_modules").is_some_and(|count| count != "-1" && count != -1) {
        return Err(FrameworkError::Form {
            reason: format!("{}: adapters at the last modules alone are not planned", stated.written("num_lora_modules")),
            hint: "write `--num_lora_modules -1` for all linear layers, or name some with `--lora_target_modules`".into(),
        });
    }
    let targets = match (is_all || stated.is_on("lora_target_linear")?, &targets[..]) {
        (true, _) => Lora::targets_named(["all"]),
        (false, []) if tool == Tool::LlamaFactory => {
            stated.assume("`training.lora.targets`: all linear layers, LLaMA-Factory's default of `lora_target`");
            Lora::targets_named(["all"])
        }
        (false, []) => {
            let (names, family) = usual_targets(model);
            stated.assume(format!("`training.lora.targets` {}: peft's default for models like {family}", names.join(" and ")));
            Lora::targets_named(names.iter().flat_map(|name| parts_of(name)))
        }
        (false, names) => Lora::targets_named(names.iter().flat_map(|name| parts_of(name))),
    };
    let also_train = read_names(stated, "lora_modules_to_save")?;
    Ok(Lora { rank, alpha, targets, also_train: also_train.iter().map(|name| format!("*{name}*")).collect::<NamePatterns>() })
}

/// Names of modules: a list, or a text separated by commas or blanks.
fn read_names(stated: &mut Stated, setting: &str) -> Result<Vec<String>, FrameworkError> {
    let parts = stated.list(setting)?;
    let mut names = Vec::new();
    for part in &parts {
        let Value::String(text) = part else { return Err(stated.wrong(setting, "a list of names")) };
        // `'[q_proj,v_proj]'`: the form of lists on the command lines of the package `fire`.
        let text = text.trim().trim_start_matches('[').trim_end_matches(']');
        let parts = text.split([',', ' ']).map(|name| name.trim_matches(['"', '\'']));
        names.extend(parts.filter(|name| !name.is_empty()).map(String::from));
    }
    let is_plain = |name: &String| name.chars().all(|letter| letter.is_ascii_alphanumeric() || "_-.".contains(letter));
    if names.iter().all(is_plain) {
        return Ok(names);
    }
    Err(FrameworkError::Form {
        reason: format!("{}: regular expressions are not read", stated.written(setting)),
        hint: "name the modules, such as `q_proj`".into(),
    })
}
