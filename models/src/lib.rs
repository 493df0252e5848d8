//! Models as graphs of operators.
//!
//! The nouns: a [`Model`] is what a user names (a zoo name, or a family with its sizes); its [`Graph`] is the
//! [`Tensor`]s and [`Operator`]s of one pass over a batch; an operator has named [`Loop`] dimensions, and once they have sizes it
//! is a [`Kernel`], which knows its arithmetic and its bytes. [`differentiate`] adds the gradients.
//!
//! The flow: `Model` → [`Model::graph`] → [`differentiate`] → the compiler in `foretell-program`.
//! This crate knows neither devices nor plans; it reads no files.
//!
//! ```
//! use foretell_models::{GraphOptions, Model, differentiate};
//! let model = Model::named("resnet50")?;
//! let options = GraphOptions::ONE;
//! let graph = model.graph("resnet50", &options)?;
//! assert_eq!(graph.parameter_count(), 25_557_032);
//! let training = differentiate(&graph, 1);
//! assert!(training.model_flops() > graph.model_flops() * 2.9);
//! # Ok::<(), foretell_models::ModelError>(())
//! ```

mod attention;
mod builder;
mod differentiate;
mod dropout;
mod error;
mod families;
mod graph;
mod kernel;
mod model;
mod optimizer;
mod sample;
mod storage;

pub use attention::{Attention, KeyStep, RelativePositions, Rope};
pub use builder::GraphOptions;
pub use differentiate::differentiate;
pub use dropout::{AttentionDropout, AttentionPlace, Dropout, DropoutRate, DropoutSite};
pub use error::ModelError;
pub use families::{Bert, CapacityFactor, Gpt, Llama, LstmSeq2seq, Mlp, Moe, Resnet, Stem, T5, Vgg, Vit};
pub use graph::{
    BATCH, Block, Dimension, EXPERTS, Extent, Graph, Initialisation, InputKind, Loop, LoopId, Operand, Operator, OperatorId,
    OperatorKind, Parameter, Pass, PublicTensor, Role, SEQUENCE, Slots, Tensor, TensorId,
};
pub use kernel::{
    Activation, Control, EightBits, Epsilon, Kernel, KernelFamily, KernelOperand, KernelSpec, MOST_OPERANDS, Mixture, Recurrence,
    Traffic, WeightLayout, Window,
};
pub use model::Model;
pub use optimizer::Optimizer;
pub use sample::SampleShape;
pub use storage::Storage;
