//! What `accelerate launch` states about a job: a configuration in a file, flags that replace its
//! settings, or only flags.

use serde_json::{Map, Value};

/// Flags of DeepSpeed. Those of FSDP start with `fsdp_`.
const OF_DEEPSPEED: [&str; 12] = [
    "zero_stage",
    "offload_optimizer_device",
    "offload_optimizer_nvme_path",
    "offload_param_device",
    "offload_param_nvme_path",
    "gradient_clipping",
    "zero3_init_flag",
    "zero3_save_16bit_model",
    "deepspeed_config_file",
    "deepspeed_hostfile",
    "deepspeed_multinode_launcher",
    "deepspeed_moe_layer_cls_names",
];

/// Switches that choose what shards a job, and the type that they choose.
const KINDS: [(&str, &str); 3] = [("use_deepspeed", "DEEPSPEED"), ("use_fsdp", "FSDP"), ("multi_gpu", "MULTI_GPU")];

/// Flags that concern only the launch, or whose value is known otherwise: the topology gives the
/// ranks.
const OF_LAUNCH: [&str; 12] = [
    "config_file",
    "num_processes",
    "num_machines",
    "module",
    "no_python",
    "quiet",
    "debug",
    "role",
    "tee",
    "log_dir",
    "max_restarts",
    "monitor_interval",
];

/// A launch by Accelerate.
#[derive(Clone, Debug, Default)]
pub(super) struct AccelerateLaunch {
    /// The file of `--config_file`.
    pub(super) file: Option<String>,
    /// The settings that flags give, by their names in a configuration.
    pub(super) settings: Map<String, Value>,
}

impl AccelerateLaunch {
    /// Reads a launcher's words; `None` if they state nothing about the job.
    pub(super) fn of_words(words: &[String]) -> Option<Self> {
        let by_command = words.windows(2).position(|pair| pair[0].ends_with("accelerate") && pair[1] == "launch");
        let names = ["accelerate-launch", "accelerate.commands.launch"];
        let by_module = words.iter().position(|word| names.iter().any(|name| word.ends_with(name)));
        let start = by_command.map(|at| at + 2).or_else(|| by_module.map(|at| at + 1));
        let mut launch = Self::default();
        for (flag, value) in flags(words.get(start?..)?) {
            match (flag.as_str(), KINDS.iter().find(|(name, _)| *name == flag)) {
                ("config_file", _) => launch.file = value,
                (_, Some((_, kind))) => _ = launch.settings.insert("distributed_type".into(), (*kind).into()),
                (name, _) if OF_LAUNCH.contains(&name) => {}
                (name, _) => {
                    let part = match name {
                        name if OF_DEEPSPEED.contains(&name) => Some("deepspeed_config"),
                        name if name.starts_with("fsdp_") => Some("fsdp_config"),
                        _ => None,
                    };
                    launch.set(part, name, value);
                }
            }
        }
        let decides = ["distributed_type", "mixed_precision", "fsdp_config", "deepspeed_config"];
        let says_more = launch.file.is_some() || decides.iter().any(|name| launch.settings.contains_key(*name));
        says_more.then_some(launch)
    }

    fn set(&mut self, part: Option<&str>, name: &str, value: Option<String>) {
        let value = value.map_or(Value::Bool(true), |text| scalar(&text));
        let Some(part) = part else {
            self.settings.insert(name.into(), value);
            return;
        };
        let part = self.settings.entry(part).or_insert_with(|| Value::Object(Map::new()));
        if let Value::Object(part) = part {
            part.insert(name.into(), value);
        }
    }

    /// The configuration as text: the file's settings, replaced by the flags' where both exist.
    pub(super) fn text(&self, of_file: Map<String, Value>) -> String {
        let mut whole = of_file;
        if whole.is_empty() {
            whole.insert("compute_environment".into(), "LOCAL_MACHINE".into());
        }
        for (name, value) in &self.settings {
            match (whole.get_mut(name), value) {
                (Some(Value::Object(part)), Value::Object(more)) => part.extend(more.clone()),
                _ => _ = whole.insert(name.clone(), value.clone()),
            }
        }
        Value::Object(whole).to_string()
    }
}

/// The flags of a command with their values. Words that belong to no flag are ignored.
fn flags(words: &[String]) -> Vec<(String, Option<String>)> {
    let mut found: Vec<(String, Option<String>)> = Vec::new();
    for word in words {
        match (word.strip_prefix("--"), found.last_mut()) {
            (Some(flag), _) => {
                let (name, value) = flag.split_once('=').map_or((flag, None), |(name, value)| (name, Some(value.to_owned())));
                found.push((name.replace('-', "_"), value));
            }
            (None, Some((_, value @ None))) => *value = Some(word.clone()),
            (None, _) => {}
        }
    }
    found
}

fn scalar(text: &str) -> Value {
    match text {
        "true" | "True" => Value::Bool(true),
        "false" | "False" => Value::Bool(false),
        text => text.parse::<u64>().map_or_else(|_| text.into(), Value::from),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(command: &str) -> Option<AccelerateLaunch> {
        let words: Vec<String> = command.split(' ').map(String::from).collect();
        AccelerateLaunch::of_words(&words)
    }

    #[test]
    fn flags_say_what_a_configuration_does() {
        let launch =
            of("accelerate launch --use_deepspeed --zero_stage 3 --num-processes=8 --mixed_precision bf16").expect("it is sound");
        let text = launch.text(Map::new());
        let value: Value = serde_json::from_str(&text).expect("it is sound");
        assert_eq!(value["distributed_type"], "DEEPSPEED");
        assert_eq!(value["deepspeed_config"]["zero_stage"], 3);
        assert_eq!((&value["mixed_precision"], value.get("num_processes")), (&"bf16".into(), None));
        let launch = of("accelerate launch --config_file a.yaml --fsdp_offload_params true").expect("it is sound");
        let file =
            serde_json::from_str(r#"{"fsdp_config": {"fsdp_offload_params": false, "fsdp_version": 2}}"#).expect("it is sound");
        let value: Value = serde_json::from_str(&launch.text(file)).expect("it is sound");
        assert_eq!(launch.file.as_deref(), Some("a.yaml"));
        assert_eq!(
            (&value["fsdp_config"]["fsdp_offload_params"], &value["fsdp_config"]["fsdp_version"]),
            (&true.into(), &2.into())
        );
        assert!(of("accelerate launch --num_processes 8").is_none() && of("torchrun --nproc_per_node 8").is_none());
    }
}
