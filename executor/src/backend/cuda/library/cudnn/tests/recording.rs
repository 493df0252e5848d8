//! A stand-in for the library that remembers what it is told and holds the caller to the library's rules: attributes of their documented types and
//! counts (`cudnn_graph_v9.h`), only before a descriptor is finalised, only finalised descriptors as parts, each given back once.

use crate::backend::cuda::library::cudnn::api::{
    Attribute, AttributeValues, CudnnApi, CudnnFailure, DescriptorKind, RawDescriptor,
};
use cudarc::cudnn::sys::cudnnBackendHeurMode_t as Mode;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// An engine in a configuration.
#[derive(Clone, Debug)]
pub(super) struct Engine {
    pub(super) notes: Vec<u32>,
    pub(super) workspace: i64,
    /// Whether its plan can be finalised.
    pub(super) is_prepared: bool,
}

#[derive(Clone, Debug)]
struct Record {
    kind: DescriptorKind,
    told: Vec<(Attribute, AttributeValues)>,
    is_final: bool,
    /// What a result of the library's is.
    engine: Option<Engine>,
}

#[derive(Debug, Default)]
struct State {
    alive: BTreeMap<RawDescriptor, Record>,
    made: Vec<DescriptorKind>,
    told: Vec<(Attribute, AttributeValues)>,
    executed: Vec<u64>,
    prepared: usize,
    calls: usize,
    fails: bool,
}

#[derive(Debug)]
pub(super) struct RecordedCudnn {
    heuristic: Vec<Engine>,
    fallback: Vec<Engine>,
    state: Mutex<State>,
}

impl RecordedCudnn {
    pub(super) fn new(heuristic: Vec<Engine>, fallback: Vec<Engine>) -> Self {
        Self { heuristic, fallback, state: Mutex::default() }
    }

    /// One more call.
    fn called(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        state.calls += 1;
        state
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Descriptors of a kind that were made.
    pub(super) fn made(&self, kind: DescriptorKind) -> usize {
        self.lock().made.iter().filter(|made| **made == kind).count()
    }

    /// All that was told of an attribute.
    pub(super) fn all_told(&self, attribute: Attribute) -> Vec<AttributeValues> {
        self.lock().told.iter().filter(|(told, _)| *told == attribute).map(|(_, values)| values.clone()).collect()
    }

    /// Plans that were tried.
    pub(super) fn prepared(&self) -> usize {
        self.lock().prepared
    }

    pub(super) fn count(&self) -> usize {
        self.lock().calls
    }

    /// Descriptors that were not given back.
    pub(super) fn alive(&self) -> usize {
        self.lock().alive.len()
    }

    /// The streams of what was executed.
    pub(super) fn executed(&self) -> Vec<u64> {
        self.lock().executed.clone()
    }

    pub(super) fn fail_executions(&self) {
        self.lock().fails = true;
    }
}

/// The type of an attribute and the fewest and most of its values, as the header says; alike for each kind of operation.
fn is_documented(attribute: Attribute, values: &AttributeValues) -> bool {
    let name = format!("{attribute:?}");
    let has_ending = |endings: &[&str]| endings.iter().any(|ending| name.ends_with(ending));
    match values {
        AttributeValues::Integers(values) => match values.len() {
            1 => has_ending(&["TENSOR_UNIQUE_ID", "BYTE_ALIGNMENT", "SPATIAL_DIMS"]),
            2 => has_ending(&["DILATIONS", "FILTER_STRIDES", "PRE_PADDINGS", "POST_PADDINGS"]),
            3 => has_ending(&["VARIANT_PACK_UNIQUE_IDS"]),
            4 => has_ending(&["TENSOR_DIMENSIONS", "TENSOR_STRIDES"]),
            _ => false,
        },
        AttributeValues::Single(_) => has_ending(&["_ALPHA", "_BETA"]),
        AttributeValues::DataType(_) => has_ending(&["TENSOR_DATA_TYPE", "CONVOLUTION_COMP_TYPE"]),
        AttributeValues::ConvolutionMode(_) => has_ending(&["CONVOLUTION_CONV_MODE"]),
        AttributeValues::HeuristicMode(_) => has_ending(&["ENGINEHEUR_MODE"]),
        AttributeValues::Descriptors(values) => {
            let endings = ["CONV_DESC", "_X", "_W", "_Y", "_DX", "_DW", "_DY", "GRAPH_OPS", "OPERATION_GRAPH", "ENGINE_CONFIG"];
            values.len() == 1 && has_ending(&endings)
        }
        AttributeValues::Pointers(values) => match values.len() {
            1 => has_ending(&["VARIANT_PACK_WORKSPACE"]),
            3 => has_ending(&["VARIANT_PACK_DATA_POINTERS"]),
            _ => false,
        },
        AttributeValues::Handle(_) => has_ending(&["OPERATIONGRAPH_HANDLE", "EXECUTION_PLAN_HANDLE"]),
        AttributeValues::Text(_) => false,
    }
}

impl CudnnApi for RecordedCudnn {
    fn create(&self, kind: DescriptorKind) -> Result<RawDescriptor, CudnnFailure> {
        let mut state = self.called();
        state.made.push(kind);
        let raw = RawDescriptor(state.made.len() as u64);
        state.alive.insert(raw, Record { kind, told: Vec::new(), is_final: false, engine: None });
        Ok(raw)
    }

    fn destroy(&self, descriptor: RawDescriptor) {
        let mut state = self.called();
        assert!(state.alive.remove(&descriptor).is_some(), "a descriptor is given back twice");
    }

    fn set(&self, descriptor: RawDescriptor, attribute: Attribute, values: &AttributeValues) -> Result<(), CudnnFailure> {
        let mut state = self.called();
        assert!(is_documented(attribute, values), "{attribute:?} is no {values:?}");
        if let AttributeValues::Descriptors(parts) = values {
            for part in parts {
                let record = &state.alive[part];
                assert!(record.is_final || record.engine.is_some(), "{:?} is not finalised", record.kind);
            }
        }
        state.told.push((attribute, values.clone()));
        let record = state.alive.get_mut(&descriptor).unwrap();
        assert!(!record.is_final, "{attribute:?} of a descriptor that is finalised");
        assert!(record.told.iter().all(|(told, _)| *told != attribute), "{attribute:?} is told twice");
        record.told.push((attribute, values.clone()));
        Ok(())
    }

    fn finalize(&self, descriptor: RawDescriptor) -> Result<(), CudnnFailure> {
        let mut state = self.called();
        let record = state.alive[&descriptor].clone();
        assert!(!record.is_final && record.engine.is_none(), "{:?} is finalised twice", record.kind);
        let mut engine = None;
        if record.kind == DescriptorKind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR {
            state.prepared += 1;
            let configuration = record.told.iter().find_map(|(_, values)| match values {
                AttributeValues::Descriptors(parts) => state.alive[&parts[0]].engine.clone(),
                _ => None,
            });
            engine = Some(configuration.expect("a plan has a configuration"));
        }
        if engine.as_ref().is_some_and(|engine: &Engine| !engine.is_prepared) {
            return Err(CudnnFailure { call: "cudnnBackendFinalize", reason: "CUDNN_STATUS_NOT_SUPPORTED".into() });
        }
        let record = state.alive.get_mut(&descriptor).unwrap();
        (record.is_final, record.engine) = (true, engine);
        Ok(())
    }

    fn integer(&self, descriptor: RawDescriptor, attribute: Attribute) -> Result<i64, CudnnFailure> {
        let state = self.called();
        assert_eq!(attribute, Attribute::CUDNN_ATTR_EXECUTION_PLAN_WORKSPACE_SIZE);
        let record = &state.alive[&descriptor];
        assert!(record.is_final);
        Ok(record.engine.as_ref().unwrap().workspace)
    }

    fn numerical_notes(&self, engine: RawDescriptor) -> Result<Vec<u32>, CudnnFailure> {
        Ok(self.called().alive[&engine].engine.as_ref().unwrap().notes.clone())
    }

    fn descriptors(
        &self,
        descriptor: RawDescriptor,
        attribute: Attribute,
        into: &[RawDescriptor],
    ) -> Result<usize, CudnnFailure> {
        let mut state = self.called();
        let record = state.alive[&descriptor].clone();
        let engines = match attribute {
            Attribute::CUDNN_ATTR_ENGINEHEUR_RESULTS => {
                assert!(record.is_final);
                let mode = record.told.iter().find_map(|(_, values)| match values {
                    AttributeValues::HeuristicMode(mode) => Some(*mode),
                    _ => None,
                });
                match mode {
                    Some(Mode::CUDNN_HEUR_MODE_A) => self.heuristic.clone(),
                    Some(Mode::CUDNN_HEUR_MODE_FALLBACK) => self.fallback.clone(),
                    _ => panic!("no mode of heuristics that is used: {mode:?}"),
                }
            }
            Attribute::CUDNN_ATTR_ENGINECFG_ENGINE => vec![record.engine.unwrap()],
            _ => panic!("{attribute:?} is not asked for"),
        };
        let count = engines.len().min(into.len());
        for (raw, engine) in into.iter().zip(engines) {
            state.alive.get_mut(raw).unwrap().engine = Some(engine);
        }
        Ok(count)
    }

    unsafe fn execute(&self, plan: RawDescriptor, pack: RawDescriptor, stream: u64) -> Result<(), CudnnFailure> {
        let mut state = self.called();
        assert!(state.alive[&plan].is_final && state.alive[&pack].is_final);
        if state.fails {
            return Err(CudnnFailure { call: "cudnnBackendExecute", reason: "CUDNN_STATUS_EXECUTION_FAILED".into() });
        }
        state.executed.push(stream);
        Ok(())
    }
}
