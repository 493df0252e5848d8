//! Tests that priced conversions are those of the compiler, and that patterns name the chosen
//! shardings.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that fails may panic")]

use super::conversions::{ConversionStep, Conversions, TensorUses};
use super::patterns::patterns;
use foretell_models::{DropoutRate, Kernel, Mlp, Model, OperatorId, Pass, Resnet, Stem, Vgg};
use foretell_program::{Axis, Choices, Collective, Layout, Operation, OperatorPatterns, Plan, ShardedPart, compile_training};
use foretell_units::DataType;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

fn models() -> impl Strategy<Value = Model> {
    let resnet = |depth| Model::Resnet(Resnet { depth, stem: Stem::Small, image: 8, channels: 1, classes: 12, width: 4 });
    let vgg = |stem, image, batch_norm| {
        Model::Vgg(Vgg {
            depth: 11,
            batch_norm,
            stem,
            image,
            channels: 3,
            classes: 12,
            width: 4,
            hidden: 16,
            dropout: if stem == Stem::Small { DropoutRate::NONE } else { DropoutRate::TENTH },
        })
    };
    prop_oneof![
        Just(resnet(18)),
        Just(resnet(50)),
        any::<bool>().prop_map(move |norm| vgg(Stem::Small, 32, norm)),
        any::<bool>().prop_map(move |norm| vgg(Stem::Imagenet, 224, norm)),
        Just(Model::Mlp(Mlp { widths: vec![8, 16, 8, 12, 4] })),
    ]
}

/// How often each step occurs.
type Counts = BTreeMap<String, usize>;

fn count(counts: &mut Counts, what: String) {
    *counts.entry(what).or_default() += 1;
}

/// Returns `true` for kernels that only conversions have.
fn is_conversion(kernel: &Kernel) -> bool {
    matches!(kernel, Kernel::Slice { .. } | Kernel::Interleave { .. } | Kernel::Deinterleave { .. })
}

fn collective(kind: Collective, bytes: u64) -> String {
    format!("{} of {bytes} bytes", kind.name())
}

/// Returns the conversion steps that the compiler emits.
fn emitted(model: &Model, plan: &Plan) -> Counts {
    let program = compile_training(model, "model", plan).expect("it can be laid out");
    let list = &program.lists[0];
    let mut counts = Counts::new();
    for one in list.instructions.iter().filter(|instruction| instruction.micro_batch.is_some()) {
        match &*one.operation {
            Operation::Compute { kernel, .. } if is_conversion(kernel) => count(&mut counts, format!("{kernel:?}")),
            Operation::Compute { kernel, .. } if list.name_of(one).ends_with(".gradient_sum") => {
                count(&mut counts, format!("gradients: {kernel:?}"));
            }
            Operation::Collective { kind, group, bytes, .. } if list.groups[group.0 as usize].axes == [Axis::Tensor] => {
                count(&mut counts, collective(*kind, bytes.count()));
            }
            _ => {}
        }
    }
    counts
}

/// Returns the conversion steps that are priced.
fn priced(choices: &Choices, plan: &Plan, operators: &[OperatorId], values: &[usize]) -> Counts {
    let graph = &choices.graph;
    let uses = TensorUses::new(graph);
    let choice_of = |id: OperatorId| {
        let place = operators.iter().position(|&operator| operator == id).unwrap();
        choices.of_operator[id.0][values[place]]
    };
    let mut counts = Counts::new();
    for conversions in Conversions::all(graph, &uses) {
        conversions.steps(choices, &uses, &choice_of, &mut |step| match step {
            ConversionStep::Kernel(kernel @ Kernel::Add { .. }) => count(&mut counts, format!("gradients: {kernel:?}")),
            ConversionStep::Kernel(kernel) => count(&mut counts, format!("{kernel:?}")),
            ConversionStep::Collective(kind, elements, tensor) => {
                let size = graph.tensor(tensor).storage.data_type(plan.precision).size().count();
                count(&mut counts, collective(kind, elements as u64 * size));
            }
        });
    }
    counts
}

/// Returns the steps that occur more or less often than expected.
fn differences(found: &Counts, expected: &Counts) -> Vec<String> {
    let all: BTreeSet<&String> = found.keys().chain(expected.keys()).collect();
    let of = |counts: &Counts, what: &String| counts.get(what).copied().unwrap_or(0);
    let differ = all.into_iter().filter(|what| of(found, what) != of(expected, what));
    differ.map(|what| format!("{what}: {} instead of {}", of(found, what), of(expected, what))).collect()
}

fn forward_operators(choices: &Choices) -> Vec<OperatorId> {
    let operators = &choices.graph.operators;
    (0..operators.len()).map(OperatorId).filter(|id| operators[id.0].pass == Pass::Forward).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    #[test]
    fn priced_conversions_are_those_that_the_compiler_emits(
        model in models(), data in 1usize..3, tensor in prop_oneof![Just(2usize), Just(4)], picks in proptest::collection::vec(0usize..16, 200),
        mostly in 0usize..4, half in any::<bool>(),
    ) {
        let layout = Layout { data, tensor, micro_batch: 4, ..Layout::default() };
        let mut plan = Plan::new(layout.clone(), data * 4);
        if half { plan.precision = DataType::Bf16; }
        let choices = Choices::new(&model, "model", &plan).expect("it can be laid out");
        let operators = forward_operators(&choices);
        // Half of the choices are random, the others equal where possible.
        let pick = |(place, id): (usize, &OperatorId)| {
            let count = choices.of_operator[id.0].len();
            let pick = picks[place % picks.len()];
            if pick < 8 { pick % count } else { mostly % count }
        };
        let values: Vec<usize> = operators.iter().enumerate().map(pick).collect();
        // The compiler refuses a `tensor` that shards no operator.
        prop_assume!(operators.iter().zip(&values).any(|(id, &value)| choices.of_operator[id.0][value].part != ShardedPart::Whole));
        let by_name = |(id, value): (&OperatorId, &usize)| {
            (choices.graph.operators[id.0].name.clone(), choices.of_operator[id.0][*value].part)
        };
        let named: OperatorPatterns = operators.iter().zip(&values).map(by_name).collect();
        plan.layout = Layout { operators: named, ..layout.clone() };
        let expected = emitted(&model, &plan);
        let priced = priced(&choices, &plan, &operators, &values);
        prop_assert_eq!(differences(&priced, &expected), Vec::<String>::new(), "{:?}", plan.layout);
        // The short form in patterns gives the same Program.
        plan.layout.operators = patterns(&choices, &operators, &values);
        prop_assert_eq!(differences(&emitted(&model, &plan), &expected), Vec::<String>::new(), "{:?}", plan.layout);
    }
}
