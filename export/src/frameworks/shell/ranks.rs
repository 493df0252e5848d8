//! The number of ranks that a launch starts: by the launcher's words, by environment variables, or
//! by what is requested from Slurm.

use super::Script;
use super::launches::Launch;

/// Launchers that start ranks themselves.
const LAUNCHERS: [&str; 6] =
    ["torchrun", "deepspeed", "accelerate", "llamafactory-cli", "torch.distributed.launch", "torch.distributed.run"];

impl Script<'_> {
    /// The ranks of a launch, if its words or the script tell. `text` is the complete script, whose
    /// comments may request nodes and tasks from Slurm.
    pub(super) fn ranks(&self, text: &str, launch: &Launch) -> Option<usize> {
        let words = &launch.launcher;
        let by_launcher = by_launcher(words).or_else(|| self.by_environment(&launch.script));
        by_launcher.or_else(|| by_tasks(text, words)).or_else(|| by_devices(launch))
    }

    /// The ranks that ms-swift's commands start, which environment variables tell.
    fn by_environment(&self, script: &str) -> Option<usize> {
        let is_of_swift = ["swift-", "megatron-"].iter().any(|start| script.starts_with(start));
        self.number("NPROC_PER_NODE").filter(|_| is_of_swift)?.checked_mul(self.number("NNODES").unwrap_or(1))
    }

    fn number(&self, name: &str) -> Option<usize> {
        self.variables.get(name)?.first()?.trim().parse().ok()
    }
}

/// The number of visible devices, if the launch starts one rank on each: `deepspeed` and
/// `accelerate` do on one node, and with one device every launcher does.
fn by_devices(launch: &Launch) -> Option<usize> {
    let is_of_several =
        |word: &String| ["nnodes", "num_nodes", "num_machines", "hostfile"].iter().any(|name| word.contains(name));
    let words = &launch.launcher;
    let count = count_of(launch.visible.as_deref()?).filter(|_| !words.iter().any(is_of_several))?;
    let has_all =
        words.iter().any(|word| matches!(word.rsplit('/').next(), Some("deepspeed" | "accelerate" | "llamafactory-cli")));
    (has_all || count == 1).then_some(count)
}

/// The number of devices in a list such as `0,1`.
fn count_of(list: &str) -> Option<usize> {
    let devices: Vec<&str> = list.split(',').map(str::trim).filter(|device| !device.is_empty()).collect();
    let are_numbers = devices.iter().all(|device| device.chars().all(|digit| digit.is_ascii_digit()));
    (are_numbers && !devices.is_empty()).then_some(devices.len())
}

/// The value of the first word that is one of these flags.
fn value_of<'a>(words: &'a [String], names: &[&str]) -> Option<&'a str> {
    let normal = |word: &str| word.trim_start_matches('-').replace('_', "-");
    let place = words.iter().position(|word| {
        word.starts_with('-') && word.split('=').next().is_some_and(|name| names.contains(&normal(name).as_str()))
    })?;
    words[place].split_once('=').map_or_else(|| words.get(place + 1).map(String::as_str), |(_, value)| Some(value))
}

/// The ranks that the words of `torchrun`, `deepspeed`, `accelerate launch` or `mpirun` request.
fn by_launcher(words: &[String]) -> Option<usize> {
    let number = |names: &[&str]| value_of(words, names)?.parse::<usize>().ok();
    // The total number of ranks.
    if let Some(all) = number(&["num-processes"]) {
        return Some(all);
    }
    if words.iter().any(|word| matches!(word.rsplit('/').next(), Some("mpirun" | "mpiexec"))) {
        return number(&["np", "n"]);
    }
    let has = |name: &str| words.iter().any(|word| word.starts_with(name));
    let nodes = match (has("--nnodes"), has("--num_nodes")) {
        (true, _) => number(&["nnodes"])?,
        (_, true) => number(&["num-nodes"])?,
        _ => 1,
    };
    // `deepspeed --include localhost:0,1`, `accelerate launch --gpu_ids 0,1`
    let listed = || {
        let list = value_of(words, &["include", "i", "gpu-ids"])?;
        count_of(list.strip_prefix("localhost:").unwrap_or(list))
    };
    number(&["nproc-per-node"]).or_else(|| number(&["num-gpus"])).or_else(listed)?.checked_mul(nodes)
}

/// The tasks that `srun` starts. Each is a rank, unless another launcher is in between.
fn by_tasks(text: &str, words: &[String]) -> Option<usize> {
    let begins = words.iter().position(|word| word.rsplit('/').next() == Some("srun"))?;
    if words.iter().any(|word| LAUNCHERS.iter().any(|launcher| word.rsplit('/').next() == Some(launcher))) {
        return None;
    }
    let asked: Vec<String> = text
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix("#SBATCH"))
        .flat_map(|line| line.split_whitespace().map(String::from).collect::<Vec<_>>())
        .collect();
    let own = &words[begins..];
    let number = |names: &[&str]| value_of(own, names).or_else(|| value_of(&asked, names))?.parse::<usize>().ok();
    // Slurm starts one task on each node by default.
    let nodes = number(&["nodes", "N"]);
    let of_node = number(&["ntasks-per-node"]).or(nodes.map(|_| 1));
    number(&["ntasks", "n"]).or_else(|| of_node?.checked_mul(nodes.unwrap_or(1)))
}
