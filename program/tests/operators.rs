//! Choices of a plan for single operators (`layout.operators`): the resulting layouts, and
//! refusals.

use foretell_models::{DropoutRate, Kernel, Mlp, Model, Resnet, Stem, Vgg};
use foretell_program::{
    Axis, Collective, Layout, Operation, OperatorPatterns, Plan, PlanError, ShardedPart, StageProgram, compile,
};

fn vgg() -> Model {
    Model::Vgg(Vgg {
        depth: 11,
        batch_norm: false,
        stem: Stem::Imagenet,
        image: 224,
        channels: 3,
        classes: 10,
        width: 4,
        hidden: 64,
        dropout: DropoutRate::TENTH,
    })
}

fn resnet() -> Model {
    Model::Resnet(Resnet { depth: 18, stem: Stem::Small, image: 8, channels: 1, classes: 10, width: 4 })
}

fn plan(layout: Layout, operators: &[(&str, ShardedPart)]) -> Plan {
    let operators = operators.iter().copied().collect();
    let batch = layout.data * layout.micro_batch;
    Plan::new(Layout { operators, ..layout }, batch)
}

fn list(model: &Model, plan: &Plan) -> StageProgram {
    compile(model, "model", plan).expect("a plan that fits").training.lists.remove(0)
}

fn kernels(list: &StageProgram) -> impl Iterator<Item = (&str, Kernel)> {
    list.instructions.iter().filter_map(|instruction| match *instruction.operation {
        Operation::Compute { kernel, .. } => Some((list.name_of(instruction), kernel)),
        _ => None,
    })
}

/// The collectives over `tensor` alone, each with the tensor's name.
fn collectives(list: &StageProgram) -> Vec<(&str, Collective)> {
    let mut collectives = Vec::new();
    for one in &list.instructions {
        if let Operation::Collective { kind, group, .. } = *one.operation
            && list.groups[group.0 as usize].axes == [Axis::Tensor]
        {
            collectives.push((list.name_of(one), kind));
        }
    }
    collectives
}

/// Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks": convolutions
/// have most of the work and few parameters, products have most of the parameters and little work.
#[test]
fn convolutions_shard_samples_and_products_features_over_the_same_ranks() {
    let layout = Layout { tensor: 4, micro_batch: 8, ..Layout::default() };
    let plan = plan(layout, &[("*", ShardedPart::Batch), ("classifier", ShardedPart::Outputs)]);
    let list = list(&vgg(), &plan);
    for (name, kernel) in kernels(&list) {
        match kernel {
            Kernel::Convolution(window) => assert_eq!((window.batch, window.out_channels), (2, window.out_channels), "{name}"),
            Kernel::Matmul { rows, columns, .. } if name != "classifier.6" => assert_eq!((rows, columns), (8, 16), "{name}"),
            _ => {}
        }
    }
    let collectives = collectives(&list);
    let of = |wanted: &str| -> Vec<Collective> {
        collectives.iter().filter(|(name, _)| *name == wanted).map(|&(_, kind)| kind).collect()
    };
    // The output of the last pooling is gathered once in the forward pass, and once more for the
    // weight's gradient, since the gathered samples are not kept.
    assert_eq!(of("features.20"), [Collective::AllGather; 2], "{collectives:?}");
    assert_eq!(of("features.20.gradient"), [Collective::ReduceScatter], "each rank receives the gradient of its own samples");
    // Gradients of convolutions are summed over `tensor`, those of products are not.
    let reduced = collectives.iter().filter(|(name, _)| name.starts_with("gradients")).count();
    assert!(reduced >= 1, "{collectives:?}");
    let weight = |name: &str| list.buffers.iter().find(|buffer| &*buffer.name == name).map(|buffer| buffer.shape[0]);
    assert_eq!((weight("features.0.weight"), weight("classifier.0.weight")), (Some(4), Some(16)));
}

#[test]
fn sharding_all_samples_over_tensor_is_data_parallelism() {
    let everything = [("*", ShardedPart::Batch)];
    let tensor = list(&resnet(), &plan(Layout { tensor: 2, micro_batch: 8, ..Layout::default() }, &everything));
    let data = list(&resnet(), &Plan::new(Layout { data: 2, micro_batch: 4, ..Layout::default() }, 8));
    let own = |list: &StageProgram| {
        // Along `tensor`, every rank loads all samples and slices its own.
        let is_slice = |kernel: &Kernel| matches!(kernel, Kernel::Slice { .. });
        kernels(list).filter(|(_, kernel)| !is_slice(kernel)).map(|(name, kernel)| (name.to_owned(), kernel)).collect::<Vec<_>>()
    };
    assert_eq!(own(&tensor), own(&data));
    let forward: Vec<_> = collectives(&tensor).into_iter().filter(|(name, _)| !name.starts_with("gradients")).collect();
    assert_eq!(forward, [("batch statistics", Collective::AllReduce)]);
}

#[test]
fn a_sum_is_scattered_if_all_readers_want_the_same_shard() {
    let operators = [("*", ShardedPart::Whole), ("layer1.0.conv1", ShardedPart::Inputs), ("layer1.0.bn1", ShardedPart::Outputs)];
    let list = list(&resnet(), &plan(Layout { tensor: 2, micro_batch: 2, ..Layout::default() }, &operators));
    let collectives = collectives(&list);
    let of = |wanted: &str| -> Vec<Collective> {
        collectives.iter().filter(|(name, _)| *name == wanted).map(|&(_, kind)| kind).collect()
    };
    assert_eq!(of("layer1.0.conv1"), [Collective::ReduceScatter], "{collectives:?}");
    assert_eq!(of("layer1.0.bn1"), [Collective::AllGather], "{collectives:?}");
}

#[test]
fn a_bias_is_merged_only_into_a_product_with_the_same_shards() {
    let model = Model::Mlp(Mlp { widths: vec![8, 16, 16, 4] });
    let layout = || Layout { tensor: 2, micro_batch: 2, ..Layout::default() };
    let biases = |operators: &[(&str, ShardedPart)]| -> Vec<String> {
        let list = list(&model, &plan(layout(), operators));
        kernels(&list).filter(|(_, kernel)| matches!(kernel, Kernel::BiasAdd { .. })).map(|(name, _)| name.to_owned()).collect()
    };
    assert_eq!(biases(&[("0", ShardedPart::Outputs), ("0.bias", ShardedPart::Outputs), ("2*", ShardedPart::Whole)]), [""; 0]);
    assert_eq!(biases(&[("0", ShardedPart::Outputs), ("0.bias", ShardedPart::Batch), ("2*", ShardedPart::Whole)]), ["0.bias"]);
}

#[test]
fn batch_statistics_are_summed_over_the_axes_that_shard_samples() {
    let operators = [("*", ShardedPart::Batch), ("layer4.*", ShardedPart::Outputs)];
    let list = list(&resnet(), &plan(Layout { data: 2, tensor: 2, micro_batch: 4, ..Layout::default() }, &operators));
    let mut groups: Vec<Vec<Axis>> = list
        .instructions
        .iter()
        .filter(|instruction| list.name_of(instruction) == "batch statistics")
        .filter_map(|instruction| match *instruction.operation {
            Operation::Collective { group, .. } => Some(list.groups[group.0 as usize].axes.clone()),
            _ => None,
        })
        .collect();
    groups.sort();
    assert_eq!(groups, [vec![Axis::Tensor, Axis::Data], vec![Axis::Data]]);
}

#[test]
fn choices_for_operators_survive_a_round_trip_through_json() {
    let plan = plan(
        Layout { tensor: 2, micro_batch: 2, ..Layout::default() },
        &[("layer?", ShardedPart::Batch), ("fc", ShardedPart::Inputs)],
    );
    let text = serde_json::to_string(&plan).expect("JSON");
    assert!(text.contains(r#""operators":{"fc":"inputs","layer?":"batch"}"#), "{text}");
    assert_eq!(serde_json::from_str::<Plan>(&text).expect("a plan"), plan);
    let usual = serde_json::to_string(&Plan::new(Layout::default(), 1)).expect("JSON");
    assert!(!usual.contains("operators"), "{usual}");
    assert!(OperatorPatterns::default().is_empty());
}

/// Evaluation has a loss of its own, on which a plan that names the loss of training cannot work.
#[test]
fn a_choice_for_the_loss_of_training_does_not_refuse_evaluation() {
    let layout = Layout { tensor: 2, micro_batch: 4, ..Layout::default() };
    let plan = plan(layout, &[("*", ShardedPart::Batch), ("loss", ShardedPart::Whole)]);
    let compiled = compile(&vgg(), "vgg", &plan).expect("a plan that fits");
    assert!(!compiled.evaluation.lists.is_empty());
}

#[test]
fn operators_that_cannot_be_sharded_as_asked_are_refused_by_name() {
    let refused = |layout: Layout, operators: &[(&str, ShardedPart)]| -> PlanError {
        compile(&resnet(), "resnet", &plan(layout, operators)).expect_err("a plan that does not fit")
    };
    let two = || Layout { tensor: 2, micro_batch: 2, ..Layout::default() };
    let error = refused(two(), &[("layer9.*", ShardedPart::Batch)]).to_string();
    assert!(error.contains("no operator or block of `resnet` is called `layer9.*`"), "{error}");
    // `conv1` has one input channel, and `fc` ten classes, which four ranks do not divide.
    let error = refused(two(), &[("conv1", ShardedPart::Inputs)]).to_string();
    assert!(error.contains("the 2 ranks of `tensor` cannot shard the `inputs` of `conv1`"), "{error}");
    let error = refused(Layout { tensor: 4, micro_batch: 4, ..two() }, &[("fc", ShardedPart::Outputs)]).to_string();
    assert!(error.contains("the `outputs` of `fc`"), "{error}");
    let error = refused(two(), &[("bn1", ShardedPart::Inputs)]).to_string();
    assert!(error.contains("the `inputs` of `bn1`"), "{error}");
    let error = refused(Layout::default(), &[("*", ShardedPart::Batch)]).to_string();
    assert!(error.contains("`tensor` is 1"), "{error}");
    let error = refused(Layout { tensor: 2, micro_batch: 3, ..two() }, &[("*", ShardedPart::Batch)]).to_string();
    assert!(error.contains("micro_batch (3) is not divisible by tensor"), "{error}");
    // A pattern may match operators that cannot be sharded, if it matches one that can.
    let layout = Layout { operators: [("*", ShardedPart::Inputs)].into_iter().collect(), ..two() };
    assert!(compile(&resnet(), "resnet", &Plan::new(layout, 2)).is_ok());
}
