//! Reads the output of `scontrol show node`: the nodes of a Slurm cluster, their resources and
//! which of these are in use. It must not run the tool.

use super::ImportError;
use std::collections::BTreeMap;

const TOOL: &str = "`scontrol show node`";
const HINT: &str = "give the whole output of `scontrol show node`";

/// A node as Slurm describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct SlurmNode {
    /// Its name.
    pub name: String,
    /// Its states, such as `ALLOCATED` or `IDLE+DRAIN`.
    pub state: String,
    /// Number of CPUs that jobs use, and of all CPUs.
    pub cpus: (usize, usize),
    /// The load average of its operating system: how many CPUs were busy, on average over a minute.
    /// `None` if it is not reported.
    pub load: Option<f64>,
    /// MiB of memory that jobs use, and of all memory.
    pub memory: (u64, u64),
    /// Generic resources, such as `gpu:h100:8`: the GPUs that jobs use, and all resources.
    pub resources: (String, String),
}

/// GPUs of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlurmGpus<'a> {
    /// Their type, if Slurm's configuration states it.
    pub kind: Option<&'a str>,
    /// Their number.
    pub count: usize,
}

impl SlurmNode {
    /// Reads all nodes of a text, with each node on one line or on several.
    ///
    /// # Errors
    /// [`ImportError::Form`] if the text names no node.
    pub fn parse_all(text: &str) -> Result<Vec<Self>, ImportError> {
        let mut nodes: Vec<BTreeMap<&str, &str>> = Vec::new();
        for word in text.split_whitespace() {
            let Some((key, value)) = word.split_once('=') else { continue };
            if key == "NodeName" {
                nodes.push(BTreeMap::new());
            }
            if let Some(node) = nodes.last_mut() {
                node.entry(key).or_insert(value);
            }
        }
        if nodes.is_empty() {
            return Err(ImportError::Form { tool: TOOL, reason: "no `NodeName=` is there".into(), hint: HINT });
        }
        nodes.iter().map(Self::read).collect()
    }

    fn read(fields: &BTreeMap<&str, &str>) -> Result<Self, ImportError> {
        let text = |key: &str| fields.get(key).copied().unwrap_or_default();
        let name = text("NodeName").to_owned();
        let number = |key: &str| {
            text(key).parse::<u64>().map_err(|_| ImportError::Form {
                tool: TOOL,
                reason: format!("`{key}` of node `{name}` is no number"),
                hint: HINT,
            })
        };
        // `AllocTRES=cpu=4,mem=8G,gres/gpu=2,gres/gpu:h100=2`: the total, then the number of each
        // type. Some clusters list only one of the two.
        let allocated = entries(text("AllocTRES"));
        let total = allocated.iter().find(|(key, _)| *key == "gres/gpu").map(|(_, count)| format!("gpu:{count}"));
        let resources = total.unwrap_or_else(|| of_tres(text("AllocTRES")));
        // Listings with one line per node leave out fields that the configured resources
        // (`CfgTRES`) have.
        let configured = entries(text("CfgTRES"));
        let of_configured = |key: &str| configured.iter().find(|(known, _)| *known == key).map(|(_, count)| *count);
        let cpus = number("CPUTot").or_else(|error| of_configured("cpu").and_then(|count| count.parse().ok()).ok_or(error));
        // GPUs missing from `Gres` may still be configured as trackable resources:
        // `CfgTRES=cpu=192,gres/gpu=4,gres/gpu:nvidia_b200=4`.
        let generic = text("Gres").replace("(null)", "");
        if let Some((_, wrong)) = gpu_entries(&generic).find(|(_, count)| positive(count).is_none()) {
            return Err(ImportError::Form {
                tool: TOOL,
                reason: format!("`Gres` of node `{name}` has `{wrong}` in place of a number of GPUs"),
                hint: "write how many it has, as in `Gres=gpu:h100:8`, or leave out the GPUs of a node that has none",
            });
        }
        let all = if gpu_types(&generic).is_empty() { of_tres(text("CfgTRES")) } else { generic };
        // CPUs are devices only in nodes without GPUs, so only these must state their number.
        let cpus = if gpu_types(&all).is_empty() { cpus? } else { cpus.unwrap_or(0) };
        let or_none = |key: &str| if text(key).is_empty() { Ok(0) } else { number(key) };
        Ok(Self {
            state: text("State").to_owned(),
            cpus: (or_none("CPUAlloc")? as usize, cpus as usize),
            load: text("CPULoad").parse().ok(),
            memory: (or_none("AllocMem")?, number("RealMemory")?),
            resources: (resources, all),
            name,
        })
    }

    /// All GPUs of the node. `None` if it has none. They have a type only if all have the same.
    pub fn gpus(&self) -> Option<SlurmGpus<'_>> {
        let types = self.gpu_types();
        let kind = if let [only] = types[..] { only.kind } else { None };
        Some(SlurmGpus { kind, count: count(&types) }).filter(|gpus| gpus.count > 0)
    }

    /// The GPUs of each type.
    pub fn gpu_types(&self) -> Vec<SlurmGpus<'_>> {
        gpu_types(&self.resources.1)
    }

    /// Number of GPUs that jobs use.
    pub fn allocated_gpus(&self) -> usize {
        count(&gpu_types(&self.resources.0))
    }

    /// Whether the node runs jobs, now or later. A node that is down, drained, failed or not yet
    /// installed does not.
    pub fn takes_jobs(&self) -> bool {
        // `DOWN*`, `IDLE+DRAIN`: a sign at the end qualifies a state. A node that is `POWERED_DOWN`
        // starts when a job needs it.
        let is_out = |state: &str| {
            let state = state.trim_end_matches(|sign: char| !sign.is_ascii_alphabetic());
            matches!(state, "DOWN" | "DRAIN" | "DRAINED" | "DRAINING" | "FAIL" | "FAILING" | "FUTURE")
        };
        !self.state.split('+').any(is_out)
    }
}

/// The keys and values of a list of trackable resources.
fn entries(list: &str) -> Vec<(&str, &str)> {
    list.split(',').filter_map(|field| field.rsplit_once('=')).collect()
}

/// Converts the GPUs in a list of trackable resources to generic resources: by type, if types are
/// stated.
fn of_tres(list: &str) -> String {
    let entries = entries(list);
    let of_types: Vec<String> =
        entries.iter().filter_map(|(key, count)| Some(format!("gpu:{}:{count}", key.strip_prefix("gres/gpu:")?))).collect();
    let total = entries.iter().find(|(key, _)| *key == "gres/gpu").map(|(_, count)| format!("gpu:{count}"));
    if of_types.is_empty() { total.unwrap_or_default() } else { of_types.join(",") }
}

/// The type and the number, as text, of each entry of GPUs in a list of generic resources.
fn gpu_entries(resources: &str) -> impl Iterator<Item = (Option<&str>, &str)> {
    // `gpu:h100:8(S:0-1)` or `gpu:8`. The list may have other resources, too.
    resources.split(',').filter_map(|resource| resource.strip_prefix("gpu:")).map(|of_gpus| {
        let plain = of_gpus.split('(').next().unwrap_or_default();
        plain.rsplit_once(':').map_or((None, plain), |(kind, count)| (Some(kind), count))
    })
}

/// A number of GPUs. `None` if the text is no positive number.
fn positive(count: &str) -> Option<usize> {
    count.parse().ok().filter(|&count| count > 0)
}

/// The GPUs of each type in a list of generic resources.
fn gpu_types(resources: &str) -> Vec<SlurmGpus<'_>> {
    let mut types: Vec<SlurmGpus<'_>> = Vec::new();
    for (kind, count) in gpu_entries(resources) {
        let Some(count) = positive(count) else { continue };
        match types.iter_mut().find(|known| known.kind == kind) {
            Some(one) => one.count = one.count.saturating_add(count),
            None => types.push(SlurmGpus { kind, count }),
        }
    }
    types
}

fn count(types: &[SlurmGpus<'_>]) -> usize {
    types.iter().fold(0, |total, kind| total.saturating_add(kind.count))
}
