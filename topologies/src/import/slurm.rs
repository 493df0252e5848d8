//! Reads `scontrol show node`: the nodes of a Slurm cluster, with what they have and what is in
//! use. It must not run the tool.

use super::ImportError;
use std::collections::BTreeMap;

const TOOL: &str = "`scontrol show node`";

/// A node as Slurm describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct SlurmNode {
    /// Its name.
    pub name: String,
    /// Its states, such as `ALLOCATED` or `IDLE+DRAIN`.
    pub state: String,
    /// CPUs that jobs have, and all of them.
    pub cpus: (usize, usize),
    /// The load of its operating system: how many CPUs were busy over a minute. `None` if it does
    /// not report.
    pub load: Option<f64>,
    /// MiB of memory that jobs have, and all of them.
    pub memory: (u64, u64),
    /// Generic resources: those of jobs, and all of them, such as `gpu:h100:8`.
    pub resources: (String, String),
}

/// GPUs of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlurmGpus<'a> {
    /// Their type, if Slurm was told it.
    pub kind: Option<&'a str>,
    /// Their number.
    pub count: usize,
}

impl SlurmNode {
    /// Reads all nodes of a text, on one line each or on several.
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
            return Err(ImportError::Form { tool: TOOL, reason: "no `NodeName=` is there".into() });
        }
        nodes.iter().map(Self::read).collect()
    }

    fn read(fields: &BTreeMap<&str, &str>) -> Result<Self, ImportError> {
        let text = |key: &str| fields.get(key).copied().unwrap_or_default();
        let name = text("NodeName").to_owned();
        let number = |key: &str| {
            text(key)
                .parse::<u64>()
                .map_err(|_| ImportError::Form { tool: TOOL, reason: format!("`{key}` of node `{name}` is no number") })
        };
        // `AllocTRES=cpu=4,mem=8G,gres/gpu:h100=2`.
        let allocated: Vec<(&str, &str)> = text("AllocTRES").split(',').filter_map(|one| one.rsplit_once('=')).collect();
        let gpus = allocated.iter().filter_map(|(key, count)| Some(format!("{}:{count}", key.strip_prefix("gres/")?)));
        // The total of a resource stands beside those of its types.
        let resources = gpus.max_by_key(String::len).unwrap_or_default();
        let none = |text: &str| text.to_owned().replace("(null)", "");
        Ok(Self {
            state: text("State").to_owned(),
            cpus: (number("CPUAlloc")? as usize, number("CPUTot")? as usize),
            load: text("CPULoad").parse().ok(),
            memory: (number("AllocMem").unwrap_or(0), number("RealMemory")?),
            resources: (resources, none(text("Gres"))),
            name,
        })
    }

    /// The GPUs, if there are any.
    pub fn gpus(&self) -> Option<SlurmGpus<'_>> {
        gpus(&self.resources.1)
    }

    /// The GPUs that jobs have.
    pub fn allocated_gpus(&self) -> usize {
        gpus(&self.resources.0).map_or(0, |gpus| gpus.count)
    }
}

/// The first GPUs of a list of generic resources.
fn gpus(resources: &str) -> Option<SlurmGpus<'_>> {
    // `gpu:h100:8(S:0-1)` or `gpu:8`; other resources stand beside it.
    let of_gpus = resources.split(',').find_map(|one| one.strip_prefix("gpu:"))?;
    let plain = of_gpus.split('(').next().unwrap_or_default();
    let (kind, count) = plain.rsplit_once(':').map_or((None, plain), |(kind, count)| (Some(kind), count));
    Some(SlurmGpus { kind, count: count.parse().ok()? }).filter(|gpus| gpus.count > 0)
}
