//! Operator sharding: the solver finds the cheapest combination by either method, and no step gets
//! slower.

use foretell_models::{GraphOptions, Model};
use foretell_planner::operator_sharding::{
    Cost, Factor, LARGEST_TABLE, Method, Problem, ShardingRequest, SolveError, applies, choose, solve,
};
use foretell_program::{Layout, OperatorPatterns, Plan, ShardedPart, compile_training};
use foretell_simulator::{CostModel, Folding, Oversubscription, predict};
use foretell_topologies::Topology;
use foretell_units::{Bytes, DataType, Picoseconds};
use proptest::prelude::*;

fn costs(count: usize, with_impossible: bool) -> impl Strategy<Value = Vec<Cost>> {
    let possible = (0u64..50, 0u64..3).prop_map(|(time, memory)| Cost { time: Picoseconds(time), memory: Bytes::new(memory) });
    let one = prop_oneof![9 => possible, 1 => Just(if with_impossible { Cost::IMPOSSIBLE } else { Cost::ZERO })];
    proptest::collection::vec(one, count)
}

/// Returns problems of a few variables, with costs that depend on one to three of them.
fn problems() -> impl Strategy<Value = Problem> {
    let sizes = proptest::collection::vec(1usize..4, 2..8);
    let with_scopes = sizes.prop_flat_map(|sizes| {
        let scope = proptest::collection::btree_set(0..sizes.len(), 1..4).prop_map(|set| set.into_iter().collect::<Vec<_>>());
        (Just(sizes), proptest::collection::vec(scope, 1..14), any::<bool>())
    });
    with_scopes.prop_flat_map(|(sizes, scopes, with_impossible)| {
        let factors: Vec<_> = scopes
            .into_iter()
            .map(|scope| {
                let count = scope.iter().map(|&variable| sizes[variable]).product();
                costs(count, with_impossible).prop_map(move |costs| Factor { scope: scope.clone(), costs })
            })
            .collect();
        (Just(sizes), factors).prop_map(|(sizes, factors)| Problem { sizes, factors })
    })
}

/// Returns problems on series-parallel graphs. They grow from one edge by putting an edge in series
/// or in parallel with another.
fn series_parallel_problems() -> impl Strategy<Value = Problem> {
    let grown = proptest::collection::vec((any::<proptest::sample::Index>(), any::<bool>()), 0..12).prop_map(|steps| {
        let mut edges = vec![[0usize, 1]];
        let mut count = 2;
        for (index, in_series) in steps {
            let place = index.index(edges.len());
            let [from, to] = edges[place];
            if in_series {
                edges[place] = [from, count];
                edges.push([count, to]);
                count += 1;
            } else {
                edges.push([from, to]);
            }
        }
        (count, edges)
    });
    grown.prop_flat_map(|(count, edges)| {
        let factors: Vec<_> =
            edges.into_iter().map(|edge| costs(9, false).prop_map(move |costs| Factor { scope: edge.to_vec(), costs })).collect();
        factors.prop_map(move |factors| Problem { sizes: vec![3; count], factors })
    })
}

fn brute_force(problem: &Problem) -> Option<Cost> {
    let count: usize = problem.sizes.iter().product();
    let all = (0..count).map(|mut number| {
        let values: Vec<usize> = problem
            .sizes
            .iter()
            .map(|&size| {
                let value = number % size;
                number /= size;
                value
            })
            .collect();
        problem.cost(&values)
    });
    all.min().filter(|cost| cost.is_possible())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn elimination_finds_what_brute_force_finds(problem in problems()) {
        match (solve(&problem, LARGEST_TABLE), brute_force(&problem)) {
            (Ok(solution), least) => {
                prop_assert_eq!(Some(solution.cost), least);
                prop_assert_eq!(problem.cost(&solution.values), solution.cost);
                prop_assert_eq!(solution.method, Method::Elimination);
            }
            (Err(error), least) => prop_assert_eq!((error, least), (SolveError::Impossible, None)),
        }
    }

    /// Small tables leave most variables to the integer program, which does not minimise memory.
    #[test]
    fn the_integer_program_finds_the_same_time(problem in problems(), largest_table in prop_oneof![Just(0usize), Just(3), Just(9)]) {
        match (solve(&problem, largest_table), brute_force(&problem)) {
            (Ok(solution), least) => prop_assert_eq!(Some(solution.cost.time), least.map(|least| least.time)),
            (Err(error), least) => prop_assert_eq!((error, least), (SolveError::Impossible, None)),
        }
    }

    #[test]
    fn series_parallel_graphs_need_tables_of_at_most_three_variables(problem in series_parallel_problems()) {
        let eliminated = solve(&problem, 27).expect("every combination is possible");
        prop_assert_eq!(eliminated.method, Method::Elimination);
        let integer = solve(&problem, 0).expect("every combination is possible");
        prop_assert_eq!(integer.method, Method::IntegerProgram);
        prop_assert_eq!(eliminated.cost.time, integer.cost.time);
    }
}

/// Returns the step time that the simulator predicts for a plan, in seconds.
fn simulated_seconds(model: &Model, plan: &Plan, topology: &Topology, costs: &CostModel) -> f64 {
    let program = compile_training(model, "model", plan).expect("it can be laid out");
    predict(&program, topology, costs, Oversubscription::Refused, Folding::On)
        .expect("it can be simulated")
        .0
        .step_seconds
        .value()
}

#[test]
fn operators_of_image_models_are_sharded_one_by_one() {
    let graph = |name: &str| Model::named(name).and_then(|model| model.graph(name, &GraphOptions::ONE)).expect("in the zoo");
    for (name, expected) in
        [("resnet50", true), ("vgg16", true), ("gpt2", false), ("llama3-8b", false), ("bert-base-uncased", false)]
    {
        assert_eq!(applies(&graph(name)), expected, "{name}");
    }
}

/// Returns the chosen sharding, and the predicted step times, in seconds, of the compiler's usual
/// sharding, of samples sharded over `tensor` everywhere, and of the chosen one.
fn compare(topology: &Topology, name: &str, layout: Layout, precision: DataType) -> (OperatorPatterns, [f64; 3]) {
    let costs = CostModel::new(None, topology);
    let model = Model::named(name).expect("in the zoo");
    let samples = layout.data * layout.micro_batch;
    let plan = Plan { precision, ..Plan::new(layout, samples) };
    let oversubscription = Oversubscription::Refused;
    let request = ShardingRequest { model: &model, name, topology, costs: &costs, plan: &plan, oversubscription };
    let sharding = choose(&request).expect("it can be laid out").expect("there is a choice");
    assert_eq!(sharding.method, Method::Elimination, "{name}");
    let with = |operators: OperatorPatterns| {
        let plan = Plan { layout: Layout { operators, ..plan.layout.clone() }, ..plan.clone() };
        simulated_seconds(&model, &plan, topology, &costs)
    };
    let all_samples = [("*", ShardedPart::Batch)].into_iter().collect();
    let seconds = [with(OperatorPatterns::default()), with(all_samples), with(sharding.operators.clone())];
    (sharding.operators, seconds)
}

#[test]
fn no_step_is_slower_than_with_the_compilers_usual_sharding() {
    for topology in ["dgx-a100-80g", "hgx-h200"] {
        let topology = Topology::library(topology).expect("in the library");
        for name in ["resnet50", "vgg16"] {
            for (data, tensor, micro_batch, precision) in
                [(1, 8, 64, DataType::Fp32), (2, 4, 32, DataType::Bf16), (1, 2, 4, DataType::Fp32), (1, 4, 128, DataType::Bf16)]
            {
                let layout = Layout { data, tensor, micro_batch, ..Layout::default() };
                let (operators, [usual, all_samples, chosen]) = compare(&topology, name, layout, precision);
                assert!(chosen <= usual, "{name} {data} x {tensor}: {chosen} with {operators:?}, usually {usual}");
                assert!(chosen <= 1.001 * all_samples, "{name} {data} x {tensor}: {chosen} with {operators:?}, or {all_samples}");
            }
        }
    }
}

/// Krizhevsky's "one weird trick" (2014).
#[test]
fn convolutions_are_sharded_by_samples_and_products_by_features() {
    let topology = Topology::library("dgx-a100-80g").expect("in the library");
    let layout = Layout { tensor: 8, micro_batch: 32, ..Layout::default() };
    let (operators, [usual, all_samples, chosen]) = compare(&topology, "vgg16", layout, DataType::Bf16);
    let said: Vec<(&str, ShardedPart)> = operators.iter().collect();
    assert_eq!(said[0], ("*", ShardedPart::Batch));
    assert!(said.contains(&("classifier", ShardedPart::Outputs)), "{said:?}");
    assert!(said.iter().all(|(name, _)| !name.starts_with("features")), "{said:?}");
    assert!(chosen < 0.7 * all_samples && chosen < 0.5 * usual, "{chosen} of {usual} and {all_samples}");
}
