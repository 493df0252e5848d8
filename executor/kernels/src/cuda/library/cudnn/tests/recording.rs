//! A stand-in for cuDNN that records calls and enforces its rules: attributes have their documented
//! types and counts (`cudnn_graph_v9.h`) and are set before a descriptor is finalised, parts are
//! finalised descriptors, and each descriptor is destroyed once.

use crate::cuda::library::cudnn::api::{Attribute, AttributeValues, CudnnApi, CudnnFailure, DescriptorKind, RawDescriptor};
use cudarc::cudnn::sys::cudnnBackendHeurMode_t as Mode;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// An engine configuration.
#[derive(Clone, Debug)]
pub(super) struct Engine {
    pub(super) notes: Vec<u32>,
    pub(super) workspace: i64,
    /// Whether finalising its plan succeeds.
    pub(super) is_prepared: bool,
}

#[derive(Clone, Debug)]
struct DescriptorRecord {
    kind: DescriptorKind,
    set: Vec<(Attribute, AttributeValues)>,
    is_final: bool,
    /// The engine, in a descriptor that the library filled.
    engine: Option<Engine>,
}

#[derive(Debug, Default)]
struct RecordedState {
    alive: BTreeMap<RawDescriptor, DescriptorRecord>,
    created: Vec<DescriptorKind>,
    set: Vec<(Attribute, AttributeValues)>,
    executed: Vec<u64>,
    prepared: usize,
    calls: usize,
    executions_fail: bool,
}

#[derive(Debug)]
pub(super) struct RecordedCudnn {
    heuristic: Vec<Engine>,
    fallback: Vec<Engine>,
    state: Mutex<RecordedState>,
}

impl RecordedCudnn {
    pub(super) fn new(heuristic: Vec<Engine>, fallback: Vec<Engine>) -> Self {
        Self { heuristic, fallback, state: Mutex::default() }
    }

    /// Counts a call, and locks the state.
    fn called(&self) -> MutexGuard<'_, RecordedState> {
        let mut state = self.lock();
        state.calls += 1;
        state
    }

    fn lock(&self) -> MutexGuard<'_, RecordedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns how many descriptors of a kind were created.
    pub(super) fn created(&self, kind: DescriptorKind) -> usize {
        self.lock().created.iter().filter(|created| **created == kind).count()
    }

    /// Returns all values that an attribute was set to.
    pub(super) fn all_set(&self, attribute: Attribute) -> Vec<AttributeValues> {
        self.lock().set.iter().filter(|(set, _)| *set == attribute).map(|(_, values)| values.clone()).collect()
    }

    /// Returns how many plans were finalised or refused.
    pub(super) fn prepared(&self) -> usize {
        self.lock().prepared
    }

    /// Returns the number of calls.
    pub(super) fn count(&self) -> usize {
        self.lock().calls
    }

    /// Returns how many descriptors were not destroyed.
    pub(super) fn alive(&self) -> usize {
        self.lock().alive.len()
    }

    /// Returns the stream of each execution.
    pub(super) fn executed(&self) -> Vec<u64> {
        self.lock().executed.clone()
    }

    /// Makes executions fail from now on.
    pub(super) fn fail_executions(&self) {
        self.lock().executions_fail = true;
    }
}

/// Returns `true` if an attribute's type and number of values are those of the header.
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
        state.created.push(kind);
        let raw = RawDescriptor(state.created.len() as u64);
        state.alive.insert(raw, DescriptorRecord { kind, set: Vec::new(), is_final: false, engine: None });
        Ok(raw)
    }

    fn destroy(&self, descriptor: RawDescriptor) {
        let mut state = self.called();
        assert!(state.alive.remove(&descriptor).is_some(), "a descriptor is destroyed twice");
    }

    fn set(&self, descriptor: RawDescriptor, attribute: Attribute, values: &AttributeValues) -> Result<(), CudnnFailure> {
        let mut state = self.called();
        assert!(is_documented(attribute, values), "{attribute:?} cannot be {values:?}");
        if let AttributeValues::Descriptors(parts) = values {
            for part in parts {
                let record = &state.alive[part];
                assert!(record.is_final || record.engine.is_some(), "{:?} is not finalised", record.kind);
            }
        }
        state.set.push((attribute, values.clone()));
        let record = state.alive.get_mut(&descriptor).unwrap();
        assert!(!record.is_final, "{attribute:?} is set after the descriptor is finalised");
        assert!(record.set.iter().all(|(set, _)| *set != attribute), "{attribute:?} is set twice");
        record.set.push((attribute, values.clone()));
        Ok(())
    }

    fn finalize(&self, descriptor: RawDescriptor) -> Result<(), CudnnFailure> {
        let mut state = self.called();
        let record = state.alive[&descriptor].clone();
        assert!(!record.is_final && record.engine.is_none(), "{:?} is finalised twice", record.kind);
        let mut engine = None;
        if record.kind == DescriptorKind::CUDNN_BACKEND_EXECUTION_PLAN_DESCRIPTOR {
            state.prepared += 1;
            let configuration = record.set.iter().find_map(|(_, values)| match values {
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
                let mode = record.set.iter().find_map(|(_, values)| match values {
                    AttributeValues::HeuristicMode(mode) => Some(*mode),
                    _ => None,
                });
                match mode {
                    Some(Mode::CUDNN_HEUR_MODE_A) => self.heuristic.clone(),
                    Some(Mode::CUDNN_HEUR_MODE_FALLBACK) => self.fallback.clone(),
                    _ => panic!("unexpected heuristics: {mode:?}"),
                }
            }
            Attribute::CUDNN_ATTR_ENGINECFG_ENGINE => vec![record.engine.unwrap()],
            _ => panic!("unexpected attribute {attribute:?}"),
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
        if state.executions_fail {
            return Err(CudnnFailure { call: "cudnnBackendExecute", reason: "CUDNN_STATUS_EXECUTION_FAILED".into() });
        }
        state.executed.push(stream);
        Ok(())
    }
}
