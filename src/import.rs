//! `foretell import`: makes a topology file from other tools' output.

use crate::failure::Failure;
use crate::inputs;
use crate::output;
use clap::{Args, ValueEnum};
use foretell_topologies::{ImportOptions, from_nccl_xml, from_smi_topo};
use serde_json::json;
use std::path::PathBuf;

/// Make a topology file from the output of NVIDIA's tools
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  nvidia-smi topo -m > topo.txt; foretell import nvidia-smi-topo topo.txt --device h100-sxm-80g --nic-bandwidth 400Gbit/s -o here.yaml
  NCCL_TOPO_DUMP_FILE=topo.xml all_reduce_perf -g 8; foretell import nccl-xml topo.xml -o here.yaml")]
pub struct Arguments {
    /// The file's format
    #[arg(value_enum)]
    form: Form,
    /// The file
    file: PathBuf,
    /// Library name of the GPUs, if the file does not identify them
    #[arg(long, value_name = "KIND")]
    device: Option<String>,
    /// Rate of one NIC, if the file does not state it
    #[arg(long, value_name = "RATE")]
    nic_bandwidth: Option<String>,
    /// The topology file to write [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Formats that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Form {
    /// The output of `nvidia-smi topo -m`
    NvidiaSmiTopo,
    /// NCCL's topology dump (`NCCL_TOPO_DUMP_FILE`)
    NcclXml,
}

/// Runs the command.
pub fn run(arguments: &Arguments, json: bool) -> Result<(), Failure> {
    let text = inputs::read(&arguments.file)?;
    let stem = arguments.output.as_ref().unwrap_or(&arguments.file).file_stem();
    let name = stem.map_or_else(|| "imported".into(), |stem| stem.to_string_lossy().into_owned());
    let options = ImportOptions { name, device: arguments.device.clone(), nic_bandwidth: arguments.nic_bandwidth.clone() };
    let imported = match arguments.form {
        Form::NvidiaSmiTopo => from_smi_topo(&text, &options),
        Form::NcclXml => from_nccl_xml(&text, &options),
    }
    .map_err(|error| Failure::Input(format!("`{}`: {error}", arguments.file.display())))?;
    match &arguments.output {
        Some(path) => output::write(path, imported.as_bytes())?,
        None if !json => return output::line(imported.trim_end()),
        None => {}
    }
    match (json, &arguments.output) {
        (true, path) => output::json(&json!({"topology": imported, "file": path})),
        (false, Some(path)) => output::line(&format!("the topology is in {}", path.display())),
        (false, None) => Ok(()),
    }
}
