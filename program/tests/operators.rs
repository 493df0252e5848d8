//! What a plan says of single operators (`layout.operators`): what is laid out then, and what is refused.

use foretell_models::{DropoutRate, Kernel, Mlp, Model, Resnet, Stem, Vgg};
use foretell_program::{Axis, Collective, Layout, Operation, OperatorShares, Plan, PlanError, Share, StageProgram, compile};

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

fn plan(layout: Layout, operators: &[(&str, Share)]) -> Plan {
    let operators = operators.iter().copied().collect();
    let batch = layout.data * layout.micro_batch;
    Plan::new(Layout { operators, ..layout }, batch)
}

fn list(model: &Model, plan: &Plan) -> StageProgram {
    compile(model, "model", plan).expect("it can be laid out").training.lists.remove(0)
}

fn kernels(list: &StageProgram) -> impl Iterator<Item = (&str, Kernel)> {
    list.instructions.iter().filter_map(|one| match *one.operation {
        Operation::Compute { kernel, .. } => Some((list.name_of(one), kernel)),
        _ => None,
    })
}

/// The collectives over `tensor` alone, each with the tensor's name.
fn exchanges(list: &StageProgram) -> Vec<(&str, Collective)> {
    let mut exchanges = Vec::new();
    for one in &list.instructions {
        if let Operation::Collective { kind, group, .. } = *one.operation
            && list.groups[group.0 as usize].axes == [Axis::Tensor]
        {
            exchanges.push((list.name_of(one), kind));
        }
    }
    exchanges
}

/// Krizhevsky 2014, "One weird trick for parallelizing convolutional neural networks": convolutions have most of the work and few parameters,
/// products most of the parameters and little work.
#[test]
fn convolutions_share_samples_and_products_share_features_over_the_same_ranks() {
    let layout = Layout { tensor: 4, micro_batch: 8, ..Layout::default() };
    let plan = plan(layout, &[("*", Share::Batch), ("classifier", Share::Outputs)]);
    let list = list(&vgg(), &plan);
    for (name, kernel) in kernels(&list) {
        match kernel {
            Kernel::Convolution(window) => assert_eq!((window.batch, window.out_channels), (2, window.out_channels), "{name}"),
            Kernel::Matmul { rows, columns, .. } if name != "classifier.6" => assert_eq!((rows, columns), (8, 16), "{name}"),
            _ => {}
        }
    }
    let exchanges = exchanges(&list);
    let of = |wanted: &str| -> Vec<Collective> {
        exchanges.iter().filter(|(name, _)| *name == wanted).map(|&(_, kind)| kind).collect()
    };
    // What the last pooling makes is gathered: once forward and, since the gathered samples are not kept, once for the gradient of the weight.
    assert_eq!(of("features.20"), [Collective::AllGather; 2], "{exchanges:?}");
    assert_eq!(of("features.20.gradient"), [Collective::ReduceScatter], "each rank gets the gradient of its own samples");
    // Gradients of convolutions are summed over `tensor` as they are over `data`; those of products are not.
    let reduced = exchanges.iter().filter(|(name, _)| name.starts_with("gradients")).count();
    assert!(reduced >= 1, "{exchanges:?}");
    let weight = |name: &str| list.buffers.iter().find(|one| &*one.name == name).map(|one| one.shape[0]);
    assert_eq!((weight("features.0.weight"), weight("classifier.0.weight")), (Some(4), Some(16)));
}

#[test]
fn all_samples_over_tensor_are_data_parallelism() {
    let everything = [("*", Share::Batch)];
    let tensor = list(&resnet(), &plan(Layout { tensor: 2, micro_batch: 8, ..Layout::default() }, &everything));
    let data = list(&resnet(), &Plan::new(Layout { data: 2, micro_batch: 4, ..Layout::default() }, 8));
    let own = |list: &StageProgram| {
        // Samples are read whole along `tensor`, and cut.
        let is_cut = |kernel: &Kernel| matches!(kernel, Kernel::Slice { .. });
        kernels(list).filter(|(_, kernel)| !is_cut(kernel)).map(|(name, kernel)| (name.to_owned(), kernel)).collect::<Vec<_>>()
    };
    assert_eq!(own(&tensor), own(&data));
    let forward: Vec<_> = exchanges(&tensor).into_iter().filter(|(name, _)| !name.starts_with("gradients")).collect();
    assert_eq!(forward, [("batch statistics", Collective::AllReduce)]);
}

#[test]
fn a_summed_output_goes_to_its_readers_as_all_of_them_want_it() {
    let operators = [("*", Share::Whole), ("layer1.0.conv1", Share::Inputs), ("layer1.0.bn1", Share::Outputs)];
    let list = list(&resnet(), &plan(Layout { tensor: 2, micro_batch: 2, ..Layout::default() }, &operators));
    let exchanges = exchanges(&list);
    let of = |wanted: &str| -> Vec<Collective> {
        exchanges.iter().filter(|(name, _)| *name == wanted).map(|&(_, kind)| kind).collect()
    };
    assert_eq!(of("layer1.0.conv1"), [Collective::ReduceScatter], "{exchanges:?}");
    assert_eq!(of("layer1.0.bn1"), [Collective::AllGather], "{exchanges:?}");
}

#[test]
fn a_product_takes_the_bias_only_where_ranks_add_it_to_what_they_made() {
    let model = Model::Mlp(Mlp { widths: vec![8, 16, 16, 4] });
    let layout = || Layout { tensor: 2, micro_batch: 2, ..Layout::default() };
    let biases = |operators: &[(&str, Share)]| -> Vec<String> {
        let list = list(&model, &plan(layout(), operators));
        kernels(&list).filter(|(_, one)| matches!(one, Kernel::BiasAdd { .. })).map(|(name, _)| name.to_owned()).collect()
    };
    assert_eq!(biases(&[("0", Share::Outputs), ("0.bias", Share::Outputs), ("2*", Share::Whole)]), [""; 0]);
    assert_eq!(biases(&[("0", Share::Outputs), ("0.bias", Share::Batch), ("2*", Share::Whole)]), ["0.bias"]);
}

#[test]
fn batch_statistics_are_summed_over_the_axes_that_share_out_the_samples_of_their_norm() {
    let operators = [("*", Share::Batch), ("layer4.*", Share::Outputs)];
    let list = list(&resnet(), &plan(Layout { data: 2, tensor: 2, micro_batch: 4, ..Layout::default() }, &operators));
    let mut groups: Vec<Vec<Axis>> = list
        .instructions
        .iter()
        .filter(|one| list.name_of(one) == "batch statistics")
        .filter_map(|one| match *one.operation {
            Operation::Collective { group, .. } => Some(list.groups[group.0 as usize].axes.clone()),
            _ => None,
        })
        .collect();
    groups.sort();
    assert_eq!(groups, [vec![Axis::Tensor, Axis::Data], vec![Axis::Data]]);
}

#[test]
fn what_operators_say_is_written_and_read_back() {
    let plan =
        plan(Layout { tensor: 2, micro_batch: 2, ..Layout::default() }, &[("layer?", Share::Batch), ("fc", Share::Inputs)]);
    let text = serde_json::to_string(&plan).expect("JSON");
    assert!(text.contains(r#""operators":{"fc":"inputs","layer?":"batch"}"#), "{text}");
    assert_eq!(serde_json::from_str::<Plan>(&text).expect("a plan"), plan);
    let usual = serde_json::to_string(&Plan::new(Layout::default(), 1)).expect("JSON");
    assert!(!usual.contains("operators"), "{usual}");
    assert!(OperatorShares::default().is_empty());
}

#[test]
fn what_cannot_be_shared_out_is_refused_by_name() {
    let refused = |layout: Layout, operators: &[(&str, Share)]| -> PlanError {
        compile(&resnet(), "resnet", &plan(layout, operators)).expect_err("it cannot be laid out")
    };
    let two = || Layout { tensor: 2, micro_batch: 2, ..Layout::default() };
    let error = refused(two(), &[("layer9.*", Share::Batch)]).to_string();
    assert!(error.contains("no operator or block of `resnet` is called `layer9.*`"), "{error}");
    // Three channels in, or ten classes over four ranks.
    let error = refused(two(), &[("conv1", Share::Inputs)]).to_string();
    assert!(error.contains("2 ranks of `tensor` cannot share out the `inputs` of `conv1`"), "{error}");
    let error = refused(Layout { tensor: 4, micro_batch: 4, ..two() }, &[("fc", Share::Outputs)]).to_string();
    assert!(error.contains("the `outputs` of `fc`"), "{error}");
    let error = refused(two(), &[("bn1", Share::Inputs)]).to_string();
    assert!(error.contains("the `inputs` of `bn1`"), "{error}");
    let error = refused(Layout::default(), &[("*", Share::Batch)]).to_string();
    assert!(error.contains("`tensor` is 1"), "{error}");
    let error = refused(Layout { tensor: 2, micro_batch: 3, ..two() }, &[("*", Share::Batch)]).to_string();
    assert!(error.contains("micro_batch (3) is not divisible by tensor"), "{error}");
    // A pattern may match what cannot, as long as it matches something that can.
    let layout = Layout { operators: [("*", Share::Inputs)].into_iter().collect(), ..two() };
    assert!(compile(&resnet(), "resnet", &Plan::new(layout, 2)).is_ok());
}
