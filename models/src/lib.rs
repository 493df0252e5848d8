//! Models as graphs of operators.
//!
//! The nouns:
//! - A [`Model`] is a family with its sizes, as a user names it or writes it into a model file.
//! - A [`Graph`] has the [`Tensor`]s and [`Operator`]s of one pass over a batch. An operator has
//!   named [`Loop`] dimensions, which a compiler may shard.
//! - A [`Kernel`] is an operator whose loops have sizes: the unit that is timed, modelled and
//!   executed. Its [`KernelSpec`] describes operands and arithmetic.
//!
//! The flow: [`Model::graph`] builds the forward graph, [`differentiate`] appends the gradients,
//! and the compiler in `foretell-program` asks each operator for the kernel of one rank
//! ([`Operator::kernel`]).
//!
//! This crate knows no devices and no plans, and reads no files.
//!
//! ```
//! use foretell_models::{GraphOptions, Kernel, Model, differentiate};
//! use foretell_units::DataType;
//!
//! let model = Model::named("resnet50")?;
//! let graph = model.graph("resnet50", &GraphOptions::ONE)?;
//! assert_eq!(graph.parameter_count(), 25_557_032);
//! let training = differentiate(&graph, 1, |_| false);
//! assert!(training.model_flops() > graph.model_flops() * 2.9);
//!
//! let spec = Kernel::BiasAdd { rows: 8, columns: 16 }.spec();
//! let reads: Vec<_> = spec.reads().map(|operand| (operand.role, operand.elements)).collect();
//! assert_eq!(reads, [("x", 128), ("bias", 16)]);
//! assert_eq!(spec.traffic().bytes(DataType::Fp32).count(), 4 * (128 + 16 + 128));
//! # Ok::<(), foretell_models::ModelError>(())
//! ```

mod adapters;
mod attention;
mod builder;
mod compression;
mod defaults;
mod differentiate;
mod dropout;
mod error;
mod evaluation;
mod families;
mod graph;
mod hugging_face;
mod kernel;
mod loss_target;
mod model;
pub mod operator_tables;
mod optimizer;
mod sample;
mod storage;
mod torch;
mod zigzag;
mod zoo;

pub use adapters::{AdapterSizes, is_adapter, linear_layers, with_adapters};
pub use attention::{Attention, RelativePositions, RingHalf, RingStep, Rope};
pub use builder::GraphOptions;
pub use compression::Compression;
pub use differentiate::differentiate;
pub use dropout::{AttentionDropout, AttentionPlace, Dropout, DropoutRate, DropoutSite};
pub use error::ModelError;
pub use evaluation::{LOGITS, TOP_FIVE, logits_only, with_evaluation};
pub use families::*;
pub use graph::{
    BATCH, Block, Dimension, EXPERTS, Extent, Graph, HiddenMatrix, Initialisation, InputKind, Loop, LoopId, Operand, Operator,
    OperatorId, Parameter, Pass, PublicTensor, Role, SEQUENCE, Tensor, TensorId,
};
pub use hugging_face::{
    ConfigError, ImportedModel, from_hugging_face, from_hugging_face_as, hugging_face_types, is_hugging_face_config,
};
pub use kernel::{
    Activation, Control, EightBits, Epsilon, Kernel, KernelFamily, KernelOperand, KernelSpec, MOST_OPERANDS, Mixture,
    NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS, Planned, PlannedKind, Recurrence, Scan, ScanRule, Smoothing, Traffic, WeightLayout,
    Window, muon_length, scale_factor,
};
pub use loss_target::{LossTarget, WEIGHT};
pub use model::Model;
pub use optimizer::Optimizer;
pub use sample::SampleShape;
pub use storage::Storage;
pub use torch::{TorchError, from_torch, is_torch_trace};
pub use zigzag::{PositionRun, Zigzag, position_runs};
