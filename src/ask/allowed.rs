//! Commands and options that may be asked for from outside, and their JSON Schemas.
//!
//! The lists below name options; their meaning and their values come from clap's description of the
//! command line. An option that is not listed is refused, so that a new one that reads or writes a
//! file does not become reachable by itself.

use serde_json::{Map, Value, json};
use std::any::TypeId;

/// What the value of an option may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// A word, a number or a switch.
    Plain,
    /// The contents of a file.
    Contents,
    /// A name of the library, or the contents of a file.
    NameOrContents,
}

use Kind::{Contents, NameOrContents, Plain};

/// A command that may be asked for.
pub(super) struct Allowed {
    /// Its words.
    pub command: &'static str,
    /// Its options and arguments.
    options: &'static [(&'static str, Kind)],
    /// Options with a value that may not be asked for.
    excluded: &'static [(&'static str, &'static str)],
    /// Whether it writes files into the folder given by `--output`. They become part of the answer.
    pub writes_files: bool,
}

const fn command(command: &'static str, options: &'static [(&'static str, Kind)]) -> Allowed {
    Allowed { command, options, excluded: &[], writes_files: false }
}

/// Every command that may be asked for. Names are checked against the command line by a test.
const ALLOWED: [Allowed; 8] = [
    Allowed {
        command: "plan",
        options: &[
            ("model", NameOrContents),
            ("topology", NameOrContents),
            ("sequence", Plain),
            ("first-nodes", Plain),
            ("nodes", Plain),
            ("global-batch", Plain),
            ("precision", Plain),
            ("method", Plain),
            ("adapter", Plain),
            ("base-bits", Plain),
            ("reference", Plain),
            ("loss", Plain),
            ("attention", Plain),
            ("optimizer", Plain),
            ("memory-limit", Plain),
            ("headroom", Plain),
            ("prefer", Plain),
            ("fix", Plain),
            ("batch-norm-group", Plain),
            ("stack", Plain),
            ("routing", NameOrContents),
            ("lengths", NameOrContents),
            ("batching", Plain),
            ("learning-rate", Plain),
            ("oversubscribe", Plain),
            ("time-limit", Plain),
            ("price-limit", Plain),
            ("objective", Plain),
            ("profile", Contents),
            ("top", Plain),
            ("scaling", Plain),
            ("front", Plain),
            ("compare", Contents),
            ("table", Plain),
            ("gpus-needed", Plain),
            ("breakeven", Plain),
            ("mode", Plain),
        ],
        // Their answers have a form that the page cannot show.
        excluded: &[("method", "grpo"), ("method", "ppo")],
        writes_files: false,
    },
    command(
        "simulate",
        &[
            ("plan", Contents),
            ("recipe", Contents),
            ("routing", NameOrContents),
            ("lengths", NameOrContents),
            ("batching", Plain),
            ("profile", Contents),
            ("critical-path", Plain),
            ("what-if", Plain),
            ("cost", Plain),
            ("steps", Plain),
            ("samples", Plain),
            ("tokens", Plain),
            ("device-price", Plain),
            ("goodput", Plain),
            ("checkpoint-every", Plain),
            ("seed", Plain),
            ("collectives", Plain),
            ("jitter", Plain),
            ("straggler", Plain),
            ("ranks", Plain),
            ("oversubscribe", Plain),
        ],
    ),
    Allowed {
        command: "export",
        options: &[("plan", Contents), ("to", Plain)],
        // Traces can have gigabytes.
        excluded: &[("to", "chakra"), ("to", "perfetto")],
        writes_files: true,
    },
    Allowed {
        command: "import",
        options: &[
            ("form", Plain),
            ("files", Contents),
            ("device", Plain),
            ("nic-bandwidth", Plain),
            ("sequence", Plain),
            ("model", NameOrContents),
            ("as", Plain),
            ("micro-batch", Plain),
            ("topology", NameOrContents),
            ("nodes", Plain),
        ],
        // Its files can have gigabytes.
        excluded: &[("form", "kineto")],
        writes_files: false,
    },
    command("models", &[]),
    command("models show", &[("name", NameOrContents)]),
    command("topologies", &[]),
    command("topologies show", &[("name", NameOrContents)]),
];

/// The commands that may be asked for.
pub fn commands() -> impl Iterator<Item = &'static str> {
    ALLOWED.iter().map(|allowed| allowed.command)
}

/// Finds a command that may be asked for, and clap's description of it.
pub(super) fn find<'a>(line: &'a clap::Command, name: &str) -> Option<(&'static Allowed, &'a clap::Command)> {
    let allowed = ALLOWED.iter().find(|allowed| allowed.command == name)?;
    let described = allowed.command.split(' ').try_fold(line, |command, word| command.find_subcommand(word))?;
    Some((allowed, described))
}

impl Allowed {
    /// The kind of an option's values. `None` if the option may not be asked for.
    pub fn kind(&self, option: &str) -> Option<Kind> {
        self.options.iter().find(|(name, _)| *name == option).map(|(_, kind)| *kind)
    }

    /// Whether a value of an option may not be asked for.
    pub fn excludes(&self, option: &str, value: &str) -> bool {
        self.excluded.iter().any(|(name, excluded)| *name == option && excluded.eq_ignore_ascii_case(value))
    }

    /// The names of the options.
    pub fn names(&self) -> impl Iterator<Item = &'static str> {
        self.options.iter().map(|(name, _)| *name)
    }
}

/// Clap's description of an option by its long name, or of an argument by its own.
pub(super) fn argument<'a>(command: &'a clap::Command, name: &str) -> Option<&'a clap::Arg> {
    let is_named = |argument: &&clap::Arg| match argument.get_long() {
        Some(long) => long == name,
        None => argument.get_id() == name,
    };
    command.get_arguments().find(is_named)
}

/// The JSON Schema of a command's options.
pub struct Schema {
    /// The schema of each option.
    pub properties: Map<String, Value>,
    /// The required options.
    pub required: Vec<String>,
}

/// Makes the JSON Schema of the options of a command that may be asked for, from clap's
/// description. `None` for other commands.
pub fn schema(line: &clap::Command, command: &str) -> Option<Schema> {
    let (allowed, described) = find(line, command)?;
    let mut schema = Schema { properties: Map::new(), required: Vec::new() };
    for &(name, kind) in allowed.options {
        let argument = argument(described, name)?;
        schema.properties.insert(name.into(), property(argument, kind, allowed));
        if argument.is_required_set() {
            schema.required.push(name.into());
        }
    }
    Some(schema)
}

fn property(argument: &clap::Arg, kind: Kind, allowed: &Allowed) -> Value {
    let name = argument.get_long().unwrap_or(argument.get_id().as_str());
    let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
    let description = match kind {
        Plain => help,
        Contents => format!("{help}: its contents, as a text or as the document itself"),
        NameOrContents => format!("{help}. In place of a path the contents of the file, as a text or as the document itself"),
    };
    let mut one = match kind {
        Plain => json!({"type": plain_type(argument)}),
        Contents | NameOrContents => json!({"type": ["string", "object"]}),
    };
    let values = argument.get_possible_values();
    let is_switch = !argument.get_action().takes_values();
    let values: Vec<&str> = values.iter().filter(|value| !value.is_hide_set()).map(|value| value.get_name()).collect();
    let values: Vec<&str> = values.into_iter().filter(|value| !allowed.excludes(name, value)).collect();
    if !values.is_empty() && !is_switch {
        one["enum"] = values.into();
    }
    let mut property = match is_list(argument) && kind == Plain {
        true => json!({"type": "array", "items": one}),
        false => one,
    };
    property["description"] = description.into();
    if let [default] = argument.get_default_values()
        && let Some(default) = default.to_str().filter(|default| !default.is_empty() && !is_switch)
    {
        property["default"] = match plain_type(argument) {
            "string" => default.into(),
            _ => serde_json::from_str(default).unwrap_or_else(|_| default.into()),
        };
    }
    property
}

/// Whether an option may be given several times.
pub(super) fn is_list(argument: &clap::Arg) -> bool {
    matches!(argument.get_action(), clap::ArgAction::Append)
}

/// The JSON type of one value.
fn plain_type(argument: &clap::Arg) -> &'static str {
    if !argument.get_action().takes_values() {
        return "boolean";
    }
    let parsed = argument.get_value_parser().type_id();
    if [TypeId::of::<usize>(), TypeId::of::<u64>()].iter().any(|id| parsed == *id) {
        "integer"
    } else if [TypeId::of::<f64>(), TypeId::of::<f32>()].iter().any(|id| parsed == *id) {
        // The option's own parser reads a share such as `6%` from a text.
        if argument.get_value_names().is_some_and(|names| names.iter().any(|name| name.as_str() == "SHARE")) {
            return "string";
        }
        "number"
    } else {
        "string"
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use std::path::PathBuf;

    #[test]
    fn every_allowed_option_is_one_of_the_command_line() {
        let line = crate::Arguments::command();
        for allowed in &ALLOWED {
            let (_, described) = find(&line, allowed.command).expect(allowed.command);
            for &(name, kind) in allowed.options {
                let argument = argument(described, name).unwrap_or_else(|| unreachable!("{}: {name}", allowed.command));
                let is_path = argument.get_value_parser().type_id() == TypeId::of::<PathBuf>();
                assert!(!is_path || kind == Contents, "`{name}` of `{}` takes a path", allowed.command);
            }
            for (name, value) in allowed.excluded {
                let argument = argument(described, name).expect(name);
                assert!(argument.get_possible_values().iter().any(|known| known.get_name() == *value), "{name}={value}");
            }
        }
    }

    #[test]
    fn options_that_read_or_write_files_are_not_allowed() {
        for allowed in &ALLOWED {
            for name in ["output", "report", "progress", "plots", "trace", "run", "beside", "samples-needed", "dump-program"] {
                assert_eq!(allowed.kind(name), None, "{}: {name}", allowed.command);
            }
        }
    }

    #[test]
    fn a_schema_has_the_types_and_values_of_the_command_line() {
        let line = crate::Arguments::command();
        let schema = schema(&line, "plan").expect("it is allowed");
        let property = |name: &str| &schema.properties[name];
        assert_eq!(property("nodes")["type"], "integer");
        assert_eq!(property("oversubscribe")["type"], "boolean");
        assert_eq!(property("method")["enum"], json!(["pretrain", "full", "lora", "qlora", "dpo", "orpo", "kto", "reward"]));
        assert_eq!(property("precision")["items"]["enum"][2], "bf16");
        assert_eq!(property("headroom")["type"], "string");
        assert_eq!(property("top")["default"], 5);
        assert_eq!(schema.required, ["model"]);
        assert!(super::schema(&line, "execute").is_none());
    }
}
