//! `foretell calibrate --stack`: the framework times its own operators.

use super::{Request, ask, python};
use crate::failure::Failure;
use crate::output;
use crate::plan_file::LoadedPlan;
use foretell_executor::machine::identity;
use foretell_program::{Exchange, ExchangeSample, FrameworkProfile, MovesSample, OperatorSample, Profile, Reach, Sample};
use foretell_topologies::DeviceId;
use foretell_units::{Bytes, SchemaVersion, Seconds};
use serde::Deserialize;
use std::path::PathBuf;
use std::time::{SystemTime, UNIX_EPOCH};

/// The framework's measurements.
#[derive(Debug, Deserialize)]
struct Answer {
    /// The operator table of the step.
    table: String,
    operators: Vec<CallTime>,
    moves: Vec<MoveTime>,
    exchanges: Vec<ExchangeTime>,
    operator_overhead: Sample,
    step_overhead: Sample,
    /// The share of the processor that a collective uses beside kernels.
    communication_share: f64,
}

#[derive(Debug, Deserialize)]
struct CallTime {
    call: String,
    bytes: u64,
    time: Sample,
}

#[derive(Debug, Deserialize)]
struct MoveTime {
    name: String,
    bytes: u64,
    time: Sample,
}

#[derive(Debug, Deserialize)]
struct ExchangeTime {
    exchange: Exchange,
    bytes: u64,
    time: Sample,
}

/// Lets the plan's framework measure its step, and returns the profile.
pub fn calibrate(loaded: &LoadedPlan, stated: Option<&PathBuf>) -> Result<Profile, Failure> {
    let request = Request::of(loaded)?;
    let answer: Answer = output::with_spinner("calibrate", || ask(python(stated), "foretell.trace.measure", &request))?;
    let none = Sample { median: Seconds::ZERO, p10: Seconds::ZERO, p90: Seconds::ZERO, count: 0 };
    let ranks = request.ranks;
    let exchange = |time: ExchangeTime| ExchangeSample {
        exchange: time.exchange,
        reach: Reach::Node,
        ranks,
        bytes: time.bytes,
        time: time.time,
        processor: Seconds::ZERO,
    };
    let framework = FrameworkProfile {
        stack: loaded.plan.stack.name().to_owned(),
        table: answer.table,
        ranks,
        threads: request.threads,
        operators: answer
            .operators
            .into_iter()
            .map(|sample| OperatorSample { call: sample.call, bytes: Bytes::new(sample.bytes), time: sample.time })
            .collect(),
        moves: answer
            .moves
            .into_iter()
            .map(|sample| MovesSample { name: sample.name, bytes: Bytes::new(sample.bytes), time: sample.time })
            .collect(),
    };
    Ok(Profile {
        schema_version: SchemaVersion,
        device: loaded.topology.device_kind(DeviceId(0)).name.clone(),
        machine: identity(ranks),
        backend: "pytorch".into(),
        transport: "gloo".into(),
        measured_at: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
        instruction_overhead: answer.operator_overhead,
        stream_handoff: none,
        step_overhead: answer.step_overhead,
        launch: Seconds::ZERO,
        load_seconds_per_byte: Seconds::ZERO,
        communication_share: answer.communication_share,
        communication_growth: None,
        interruption: Seconds::ZERO,
        buffered_bytes: 0,
        paces: vec![1.0],
        reference: None,
        speeds: Vec::new(),
        input: None,
        storage: None,
        framework: Some(framework),
        kernels: Vec::new(),
        exchanges: answer.exchanges.into_iter().map(exchange).collect(),
    })
}
