//! That traffic is what the compiler lays out, whatever is chosen; and that what is said in patterns is what was chosen.
#![allow(clippy::unwrap_used, clippy::indexing_slicing, reason = "a test that fails may panic")]

use super::patterns::patterns;
use super::traffic::{Traffic, Uses, Work};
use foretell_models::{DropoutRate, Kernel, Mlp, Model, OperatorId, Pass, Resnet, Stem, Vgg};
use foretell_program::{Axis, Choices, Collective, Layout, Operation, OperatorShares, Plan, Share, compile_training};
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

/// How often something is done.
type Counts = BTreeMap<String, usize>;

fn count(counts: &mut Counts, what: String) {
    *counts.entry(what).or_default() += 1;
}

/// Conversions and additions, as those who are given work see them.
fn is_between_operators(kernel: &Kernel) -> bool {
    matches!(kernel, Kernel::Slice { .. } | Kernel::Interleave { .. } | Kernel::Deinterleave { .. })
}

fn exchange(kind: Collective, bytes: u64) -> String {
    format!("{} of {bytes} bytes", kind.name())
}

/// What the compiler lays out between operators.
fn laid_out(model: &Model, plan: &Plan) -> Counts {
    let program = compile_training(model, "model", plan).expect("it can be laid out");
    let list = &program.lists[0];
    let mut counts = Counts::new();
    for one in list.instructions.iter().filter(|one| one.micro_batch.is_some()) {
        match &*one.operation {
            Operation::Compute { kernel, .. } if is_between_operators(kernel) => count(&mut counts, format!("{kernel:?}")),
            Operation::Compute { kernel, .. } if list.name_of(one).ends_with(".gradient_sum") => {
                count(&mut counts, format!("gradients: {kernel:?}"));
            }
            Operation::Collective { kind, group, bytes, .. } if list.groups[group.0 as usize].axes == [Axis::Tensor] => {
                count(&mut counts, exchange(*kind, bytes.count()));
            }
            _ => {}
        }
    }
    counts
}

/// What is priced between operators.
fn priced(choices: &Choices, plan: &Plan, operators: &[OperatorId], values: &[usize]) -> Counts {
    let graph = &choices.graph;
    let uses = Uses::new(graph);
    let of = |id: OperatorId| {
        let place = operators.iter().position(|&one| one == id).unwrap();
        choices.of_operator[id.0][values[place]]
    };
    let mut counts = Counts::new();
    for traffic in Traffic::all(graph, &uses) {
        traffic.work(choices, &uses, &of, &mut |work| match work {
            Work::Kernel(kernel @ Kernel::Add { .. }) => count(&mut counts, format!("gradients: {kernel:?}")),
            Work::Kernel(kernel) => count(&mut counts, format!("{kernel:?}")),
            Work::Exchange(kind, elements, tensor) => {
                let size = graph.tensor(tensor).storage.data_type(plan.precision).size().count();
                count(&mut counts, exchange(kind, elements as u64 * size));
            }
        });
    }
    counts
}

/// What is not done as often.
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
    fn what_is_exchanged_is_what_the_compiler_lays_out(
        model in models(), data in 1usize..3, tensor in prop_oneof![Just(2usize), Just(4)], picks in proptest::collection::vec(0usize..16, 200),
        mostly in 0usize..4, half in any::<bool>(),
    ) {
        let layout = Layout { data, tensor, micro_batch: 4, ..Layout::default() };
        let mut plan = Plan::new(layout.clone(), data * 4);
        if half { plan.precision = DataType::Bf16; }
        let choices = Choices::new(&model, "model", &plan).expect("it can be laid out");
        let operators = forward_operators(&choices);
        // Some choices at random, the others mostly the same.
        let pick = |(place, id): (usize, &OperatorId)| {
            let count = choices.of_operator[id.0].len();
            let pick = picks[place % picks.len()];
            if pick < 8 { pick % count } else { mostly % count }
        };
        let values: Vec<usize> = operators.iter().enumerate().map(pick).collect();
        // A `tensor` of which nothing makes use is refused.
        prop_assume!(operators.iter().zip(&values).any(|(id, &value)| choices.of_operator[id.0][value].share != Share::Whole));
        let by_name = |(id, value): (&OperatorId, &usize)| {
            (choices.graph.operators[id.0].name.clone(), choices.of_operator[id.0][*value].share)
        };
        let named: OperatorShares = operators.iter().zip(&values).map(by_name).collect();
        plan.layout = Layout { operators: named, ..layout.clone() };
        let expected = laid_out(&model, &plan);
        let priced = priced(&choices, &plan, &operators, &values);
        prop_assert_eq!(differences(&priced, &expected), Vec::<String>::new(), "{:?}", plan.layout);
        // In few patterns as in many.
        plan.layout.operators = patterns(&choices, &operators, &values);
        prop_assert_eq!(differences(&laid_out(&model, &plan), &expected), Vec::<String>::new(), "{:?}", plan.layout);
    }
}
