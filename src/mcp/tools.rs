//! The tools: the command that each one runs, and the JSON Schema of its input, which is that of
//! the command's options.

use crate::ask::{self, Refusal, Request};
use foretell_units::diagnostic::Mistake;
use serde_json::{Map, Value, json};

/// How a tool's answer is summarised.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Summary {
    /// Layouts of a search.
    Plan,
    /// A simulated step.
    Step,
    /// A table of jobs.
    Table,
    /// Files of another tool.
    Files,
    /// A model, topology or plan that was read.
    Import,
    /// A list or a file of the library.
    Library,
}

/// A tool.
#[derive(Debug)]
pub struct Tool {
    /// The tool's name.
    pub name: &'static str,
    description: &'static str,
    /// The command that answers.
    command: &'static str,
    /// Options of the command that the tool does not offer.
    without: &'static [&'static str],
    /// Options that the tool requires in addition to those that the command requires, or for which
    /// it has a default.
    required: &'static [(&'static str, Option<&'static str>)],
    /// How its answer is summarised.
    pub summary: Summary,
}

/// Options of `plan` for which there are separate tools.
const OTHER_QUESTIONS: [&str; 5] = ["compare", "table", "scaling", "front", "gpus-needed"];

/// The tool that reads an error message.
const EXPLAIN: &str = "explain_error";

/// Every tool.
pub const TOOLS: [Tool; 10] = [
    Tool {
        name: "plan",
        description: "Find the fastest layouts of a training job on a cluster, and predict step time, throughput and memory. \
                      Use it for: does it fit, how fast is it, which parallelism. The cluster may be said, such as `8xh100`.",
        command: "plan",
        without: &["compare", "table"],
        required: &[],
        summary: Summary::Plan,
    },
    Tool {
        name: "simulate",
        description: "Predict the step of one plan: time with its interval, memory by part, where the time goes, price and \
                      days of a run. `plan` takes the `plan` of an answer, or the text of a plan file.",
        command: "simulate",
        without: &["what-if"],
        required: &[],
        summary: Summary::Step,
    },
    Tool {
        name: "fits",
        description: "Plan a table of jobs and say which fit: context length by method, or two others of context, method, \
                      batch, nodes and loss. Takes some seconds a cell unless `time-limit` is short.",
        command: "plan",
        without: &["compare", "scaling", "front", "gpus-needed", "mode", "top"],
        required: &[("table", Some("context,method"))],
        summary: Summary::Table,
    },
    Tool {
        name: "compare",
        description: "Lay a plan of your own (`compare`) beside the best layout that the search finds for the same job.",
        command: "plan",
        without: &["table", "scaling", "front", "gpus-needed"],
        required: &[("compare", None)],
        summary: Summary::Plan,
    },
    Tool {
        name: "what_if",
        description: "Predict a plan's step again for other devices or links, such as `inter_node.bandwidth*2`, `peak*2`, \
                      `memory_bandwidth*1.5` or `intra_node.bandwidth/2`. Each entry is a question of its own; commas join several changes.",
        command: "simulate",
        without: &["critical-path"],
        required: &[("what-if", None)],
        summary: Summary::Step,
    },
    Tool {
        name: "import",
        description: "Read a file of another tool (config.json, nvidia-smi topo -m, Megatron arguments, DeepSpeed, torchtitan, \
                      Trainer, Accelerate, Slurm nodes) as a model, topology or plan of Foretell.",
        command: "import",
        without: &[],
        required: &[],
        summary: Summary::Import,
    },
    Tool {
        name: "export",
        description: "Write a plan as another framework's job. The files are in `contents` of the answer.",
        command: "export",
        without: &[],
        required: &[],
        summary: Summary::Files,
    },
    Tool {
        name: EXPLAIN,
        description: "Explain an out-of-memory message of PyTorch by the prediction of its job, with what would fit. Give the \
                      message as `error`, and the job: either `plan`, or `model` and `topology` with what else is known.",
        command: "plan",
        without: &OTHER_QUESTIONS,
        required: &[],
        summary: Summary::Plan,
    },
    Tool {
        name: "models",
        description: "List the models of the library, with their parameters.",
        command: "models",
        without: &[],
        required: &[],
        summary: Summary::Library,
    },
    Tool {
        name: "topologies",
        description: "List the clusters of the library. Others can be said, such as `8xh100` or `4x8xa100-80g@200Gbit/s`.",
        command: "topologies",
        without: &[],
        required: &[],
        summary: Summary::Library,
    },
];

impl Tool {
    /// The tool as `tools/list` describes it. `line` is clap's description of the command line.
    pub fn document(&self, line: &clap::Command) -> Value {
        let ask::Schema { mut properties, mut required } =
            ask::schema(line, self.command).expect("invariant: a tool's command may be asked for");
        properties.retain(|name, _| !self.without.contains(&name.as_str()));
        for &(name, default) in self.required {
            match (default, properties.get_mut(name)) {
                (Some(default), Some(property)) => property["default"] = default.into(),
                _ => required.push(name.into()),
            }
        }
        if self.name == EXPLAIN {
            let plan =
                "The plan of the job, in place of its model and topology: its contents, as a text or as the document itself";
            properties.insert("plan".into(), json!({"type": ["string", "object"], "description": plan}));
            properties.insert("error".into(), json!({"type": "string", "description": "The error message"}));
            required = vec!["error".into()];
        } else {
            let details = "Whether to give the whole document in place of a short one";
            properties.insert("details".into(), json!({"type": "boolean", "description": details, "default": false}));
        }
        json!({
            "name": self.name,
            "description": self.description,
            "inputSchema": {"type": "object", "properties": properties, "required": required, "additionalProperties": false},
            "annotations": {"readOnlyHint": true, "openWorldHint": false},
        })
    }
}

/// A call of a tool.
#[derive(Debug)]
pub struct Call {
    /// The tool.
    pub tool: &'static Tool,
    options: Map<String, Value>,
    /// Whether the complete document is wanted.
    pub details: bool,
    /// The message to explain.
    pub error_text: Option<String>,
}

impl Call {
    /// Reads the parameters of `tools/call`.
    pub fn read(parameters: &Value) -> Result<Self, Mistake> {
        let name = parameters["name"].as_str().unwrap_or_default();
        let tool = TOOLS.iter().find(|tool| tool.name == name).ok_or_else(|| {
            let hint = foretell_units::suggest(name, TOOLS.iter().map(|tool| tool.name));
            Mistake::new(format!("there is no tool `{name}`"), hint)
        })?;
        let mut options = match &parameters["arguments"] {
            Value::Object(options) => options.clone(),
            Value::Null => Map::new(),
            _ => return Err(Mistake::new("`arguments` is an object", "give options by their names")),
        };
        let details = options.remove("details").and_then(|details| details.as_bool()).unwrap_or_default();
        let error_text = match (tool.name == EXPLAIN, options.remove("error")) {
            (true, Some(Value::String(text))) => Some(text),
            (true, _) => return Err(Mistake::new("`error` is missing", "give the error message")),
            (false, None) => None,
            (false, Some(_)) => return Err(Mistake::new(format!("`{name}` has no `error`"), format!("use `{EXPLAIN}`"))),
        };
        Ok(Self { tool, options, details, error_text })
    }

    /// The question that answers the call.
    pub fn request(&self) -> Result<Request, Refusal> {
        let mut options = self.options.clone();
        if let Some(name) = options.keys().find(|name| self.tool.without.contains(&name.as_str())) {
            let hint = "`tools/list` says which tool has it";
            return Err(Refusal::Question(format!("`{}` has no `{name}`", self.tool.name), hint.into()));
        }
        for &(name, default) in self.tool.required {
            match default {
                Some(default) if !options.contains_key(name) => {
                    options.insert(name.into(), default.into());
                }
                None if !options.contains_key(name) => {
                    return Err(Refusal::Question(format!("`{}` needs `{name}`", self.tool.name), "give it".into()));
                }
                _ => {}
            }
        }
        let is_of_plan = self.error_text.is_some() && options.contains_key("plan");
        let command = if is_of_plan { "simulate" } else { self.tool.command };
        Ok(Request { command: command.into(), options, ..Request::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn every_tool_has_the_schema_of_its_command() {
        let line = crate::Arguments::command();
        for tool in &TOOLS {
            let document = tool.document(&line);
            let properties = document["inputSchema"]["properties"].as_object().expect("properties");
            let known = ask::schema(&line, tool.command).expect("a command").properties;
            for name in tool.without {
                assert!(known.contains_key(*name) && !properties.contains_key(*name), "{}: {name}", tool.name);
            }
            for name in document["inputSchema"]["required"].as_array().expect("a list") {
                assert!(properties.contains_key(name.as_str().expect("a name")), "{}: {name}", tool.name);
            }
        }
    }

    #[test]
    fn calls_become_questions() {
        let call = |name: &str, arguments: Value| Call::read(&json!({"name": name, "arguments": arguments}));
        let fits = call("fits", json!({"model": "gpt2", "details": true})).expect("a call");
        assert!(fits.details);
        assert_eq!(fits.request().expect("a question").options["table"], "context,method");
        assert!(call("compare", json!({"model": "gpt2"})).expect("a call").request().is_err(), "nothing to compare");
        assert!(call("plan", json!({"table": "context,method"})).expect("a call").request().is_err(), "another tool's");
        let explain = call("explain_error", json!({"error": "x", "plan": {}})).expect("a call");
        assert_eq!(explain.request().expect("a question").command, "simulate");
        assert!(
            call("explain_error", json!({})).is_err() && call("execute", json!({})).is_err() && call("plan", json!([])).is_err()
        );
    }
}
