//! The names and types of the fields of the planner's page.

use super::{commands, schema};
use crate::failure::{Failure, code};
use foretell_models::Model;
use foretell_simulator::gpu::Profiles;
use foretell_topologies::Topology;
use serde::Serialize;
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// The page gets these names and types before it asks anything.
#[derive(Serialize)]
struct Known {
    version: &'static str,
    models: Vec<&'static str>,
    topologies: Vec<String>,
    stacks: Vec<String>,
    /// The JSON Schemas of the options of each command that may be asked for.
    commands: BTreeMap<&'static str, Map<String, Value>>,
}

/// The names and types of the page's fields, as JSON. `line` is clap's description of the command
/// line, `machines` are topologies that are no part of the library.
pub fn known(line: &clap::Command, machines: &[&'static str]) -> Result<String, Failure> {
    let profiles = Profiles::library().map_err(Failure::of_undone)?;
    let schemas = commands().filter_map(|name| Some((name, schema(line, name)?.properties)));
    let known = Known {
        version: env!("CARGO_PKG_VERSION"),
        models: Model::names().collect(),
        topologies: Topology::library_names().chain(machines.iter().copied()).map(str::to_owned).collect(),
        stacks: profiles.stack_names().map(str::to_owned).collect(),
        commands: schemas.collect(),
    };
    serde_json::to_string(&known).map_err(|error| Failure::undone(code::SYSTEM, error.to_string()))
}
