//! Refused plans and their messages.

use super::*;
use foretell_units::diagnostic::{Mistake, one_line};

/// The message of a refused plan.
fn refusal(model: &Model, plan: &Plan) -> String {
    let error = one_line(&compile(model, "m", plan).expect_err("a plan that does not fit"));
    assert!(error.contains("; hint: "), "{error}");
    error
}

#[test]
fn a_tensor_axis_that_shards_nothing_is_refused() {
    let layout = |tensor| Layout { tensor, ..Layout::default() };
    let refused = |model: &Model, tensor| refusal(model, &Plan::new(layout(tensor), 4));
    let perceptron = Model::Mlp(Mlp { widths: vec![784, 512, 512, 10] });
    let error = refused(&perceptron, 3);
    assert!(error.starts_with("`features` of `0` (512) is not divisible by tensor (3)"), "{error}");
    let gpt = gpt(r#""layers": 1, "hidden": 30, "heads": 5, "ffn": 25, "vocab": 33, "sequence": 8"#);
    let error = refused(&gpt, 2);
    assert!(error.contains("`heads` of `transformer.h.0.attn.c_attn` (5) is not divisible by tensor (2)"), "{error}");
    let error = refused(&Model::Mlp(Mlp { widths: vec![8, 4] }), 2);
    assert!(error.starts_with("`tensor`: `m` has no width that 2 ranks can shard"), "{error}");
    assert!(compile(&perceptron, "m", &Plan::new(layout(4), 4)).is_ok());
}

#[test]
fn plans_beyond_any_machine_are_refused_before_memory_runs_out() {
    let small = Model::Mlp(Mlp { widths: vec![8, 8, 4] });
    let layout = Layout::default();
    let plan = |layout: Layout, global_batch| Plan::new(layout, global_batch);
    let max = usize::MAX;
    let cases = [
        (small.clone(), plan(layout.clone(), 1 << 30), "or raise `data` or `micro_batch`"),
        (small.clone(), plan(layout.clone(), max), "`global_batch`: more than"),
        (small.clone(), plan(Layout { micro_batch: max, data: 2, ..layout.clone() }, 1 << 32), "is not divisible by"),
        (small.clone(), plan(Layout { data: max, tensor: max, ..layout.clone() }, 1 << 32), "global_batch (4294967296)"),
        (small.clone(), plan(Layout { tensor: max, pipeline: max, ..layout.clone() }, 8), "multiply to more than"),
        (small.clone(), plan(Layout { pipeline: 2, cuts: Some(vec![max, 3]), ..layout.clone() }, 8), "does not divide 2 blocks"),
        (
            Model::Mlp(Mlp { widths: vec![2; 2000] }),
            plan(Layout { pipeline: 1500, ..layout.clone() }, 8),
            "use at most 1024 stages",
        ),
        (
            Model::Mlp(Mlp { widths: vec![1 << 24, 1 << 16, 4] }),
            plan(Layout { micro_batch: 1 << 22, ..layout.clone() }, 1 << 32),
            "larger than 256 PiB",
        ),
        (
            Model::Resnet(Resnet { depth: 18, stem: Stem::Imagenet, image: 8192, channels: 3, classes: 10, width: 64 }),
            plan(Layout { micro_batch: 2, ..layout.clone() }, 2),
            "`maxpool` has more than 2^31 input elements",
        ),
        (small, plan(Layout { micro_batch: 1 << 32, ..layout }, 1 << 32), ""),
    ];
    for (model, plan, expected) in cases {
        match compile(&model, "m", &plan) {
            // The last plan is the largest that compiles.
            Ok(compiled) => assert!(expected.is_empty() && compiled.arenas()[0].value() > 2.0f64.powi(34), "{expected}"),
            Err(error) => {
                let error = one_line(&error);
                assert!(error.contains(expected) && error.contains("; hint: "), "{error}");
            }
        }
    }
}

#[test]
fn meaningless_optimizer_parameters_are_refused() {
    let model = Model::Mlp(Mlp { widths: vec![8, 8, 4] });
    let usual = Training::default;
    let cases = [
        ("learning_rate", Training { learning_rate: Some(f32::NAN), ..usual() }),
        ("learning_rate", Training { learning_rate: Some(-0.1), ..usual() }),
        ("momentum", Training { momentum: f32::INFINITY, ..usual() }),
        ("weight_decay", Training { weight_decay: -1.0, ..usual() }),
        ("beta1", Training { beta1: 1.0, ..usual() }),
        ("beta2", Training { beta2: f32::NAN, ..usual() }),
        ("epsilon", Training { epsilon: 0.0, ..usual() }),
        ("label_smoothing", Training { label_smoothing: 1.0, ..usual() }),
        ("class_weights", Training { class_weights: vec![1.0; 3], ..usual() }),
        ("class_weights", Training { class_weights: vec![0.0; 4], ..usual() }),
        ("class_weights", Training { class_weights: vec![1.0, 1.0, 1.0, -1.0], ..usual() }),
        ("schedule", Training { schedule: LearningRateSchedule::Step { every: Period::Steps(0), factor: 0.1 }, ..usual() }),
        ("warm_up.length", Training { warm_up: Some(WarmUp { length: Period::Epochs(0), from: 0.5 }), ..usual() }),
        ("warm_up.from", Training { warm_up: Some(WarmUp { length: Period::Epochs(1), from: 2.0 }), ..usual() }),
        ("evaluate_every", Training { evaluate_every: Some(Period::Steps(0)), ..usual() }),
        ("frozen", Training { frozen: ["head.*"].into_iter().collect(), ..usual() }),
        ("frozen", Training { frozen: ["*"].into_iter().collect(), ..usual() }),
    ];
    for (field, training) in cases {
        let plan = Plan { training, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 4) };
        assert!(matches!(compile(&model, "m", &plan), Err(PlanError::Invalid { .. })));
        assert!(refusal(&model, &plan).starts_with(&format!("`training.{field}`: ")), "{field}");
    }
    let zero = Training { learning_rate: Some(0.0), momentum: 0.0, beta1: 0.0, ..usual() };
    assert!(compile(&model, "m", &Plan { training: zero, ..Plan::new(Layout::default(), 4) }).is_ok());
}

/// The message of a plan of four replicas in a mode, as a file has it.
fn refused_mode(mode: &str, change: impl Fn(&mut Plan)) -> String {
    let model = Model::Mlp(Mlp { widths: vec![8, 8, 4] });
    match serde_json::from_str(mode) {
        Ok(mode) => {
            let mut plan = Plan { mode, ..Plan::new(Layout { data: 4, ..Layout::default() }, 4) };
            change(&mut plan);
            refusal(&model, &plan)
        }
        Err(error) => Mistake::recorded(&error.to_string()).map_or_else(|| error.to_string(), |mistake| one_line(&mistake)),
    }
}

#[test]
fn a_mode_without_meaning_or_not_there_yet_is_refused_in_a_sentence() {
    for (mode, expected) in [
        (r#"{"local_sgd": {"every": 0}}"#, "after every 0 steps"),
        (r#"{"decentralised": {"graph": "ring", "every": 0}}"#, "after every 0 steps"),
        (r#"{"local_sgd": {"every": 2, "outer": {"learning_rate": 0}}}"#, "not above 0"),
        (r#"{"local_sgd": {"every": 2, "outer": {"momentum": 1}}}"#, "momentum is not from 0"),
        (r#"{"local_sgd": {"every": 2, "outer": {"optimizer": "nesterov", "momentum": 0}}}"#, "needs a momentum"),
        (r#"{"local_sgd": {"every": 2, "fragments": 0}}"#, "parameters in 0 fragments are never exchanged"),
        (r#"{"local_sgd": {"every": 2, "fragments": 4}}"#, "4 fragments take turns in a round of 2 steps"),
        (r#"{"local_sgd": {"every": 90, "fragments": 30}}"#, "30 fragments, but `m` has only 2 blocks to put into them"),
        (r#"{"local_sgd": {"every": 2, "overlap": 2}}"#, "an exchange would not end before the next one, 2 steps later"),
        (r#"{"local_sgd": {"every": 7, "fragments": 2, "overlap": 3}}"#, "would not end before the next one, 3 steps later"),
        (r#"{"local_sgd": {"every": 99999, "fragments": 2, "overlap": 9999}}"#, "more than 1024 kinds of steps"),
        (r#"{"local_sgd": {"every": 4, "overlap": 1, "mixing": 1}}"#, "the share of its own parameters"),
        (
            r#"{"local_sgd": {"every": 2, "compression": "int4"}}"#,
            "`int4` is no format for numbers that travel; hint: use `fp32`",
        ),
        (r#"{"local_sgd": {"every": 4, "overlap": 1, "compression": "int8"}}"#, "between more than two replicas"),
        (r#"{"decentralised": {"graph": "ring", "compression": "int8"}}"#, "`decentralised` has no `compression`: "),
        (r#"{"parameter_server": {"servers": 0}}"#, "no server is left"),
        (r#"{"parameter_server": {"servers": 1, "staleness": -1}}"#, "a staleness of -1 steps is below 0; hint: "),
        (r#"{"parameter_server": {"servers": 1, "staleness": "some"}}"#, "`some` is no staleness; hint: "),
        (r#"{"parameter_server": {"servers": 1, "staleness": 10000000000000000000}}"#, "this is no staleness; hint: "),
        (r#"{"parameter_server": {"servers": 20000}}"#, "20000 servers of 4 workers, and at most 1024 servers"),
        (r#"{"parameter_server": {"servers": 1, "backup_workers": -1}}"#, "-1 backup workers are below 0; hint: "),
        (r#"{"parameter_server": {"servers": 1, "backup_workers": 4}}"#, "4 backup workers of 4 leave no gradients"),
        (r#"{"parameter_server": {"servers": 1, "backup_workers": 1, "staleness": "unbounded"}}"#, "no backup worker is late"),
        (r#"{"parameter_server": {"servers": 1, "backup_workers": 1, "compression": "int8"}}"#, "a late push is dropped"),
        (r#"{"local_sgd": {"every": 2, "backup_workers": 1}}"#, "only `parameter_server` has `backup_workers`; hint: "),
        (r#"{"decentralised": {"graph": "ring", "backup_workers": 1}}"#, "only `parameter_server` has `backup_workers`; hint: "),
        (r#"{"parameter_server": {"servers": 2, "beside_workers": true}}"#, "2 servers beside 4 workers"),
        (
            r#"{"parameter_server": {"servers": 1, "compression": "int3"}}"#,
            "`int3` is no format for numbers that travel; hint: use `fp32`",
        ),
        (
            r#"{"parameter_server": {"servers": 4, "beside_workers": true, "compression": "int8"}}"#,
            "a reduce-scatter, which adds them in single precision",
        ),
        (r#"{"decentralised": {"graph": "star"}}"#, "unknown variant `star`"),
    ] {
        let error = refused_mode(mode, |_| {});
        assert!(error.contains(expected), "{mode}: {error}");
    }
}

#[test]
fn a_mode_that_the_rest_of_the_plan_cannot_have_is_refused() {
    let local = r#"{"local_sgd": {"every": 2}}"#;
    let layout = |change: fn(&mut Layout)| move |plan: &mut Plan| change(&mut plan.layout);
    let check = |error: String, expected: &str| assert!(error.contains(expected), "{error}");
    check(refused_mode(local, layout(|layout| layout.data = 1)), "one replica has no other");
    check(refused_mode(local, layout(|layout| layout.zero = 1)), "ZeRO shards the state over all of `data`");
    check(refused_mode(local, layout(|layout| (layout.data, layout.shares) = (2, Some(vec![3, 1])))), "equal parts of the batch");
    check(refused_mode(local, layout(|layout| layout.offload = Offload::Optimizer)), "not there yet in this mode");
    check(refused_mode(local, |plan| plan.precision = DataType::Fp16), "loss scale of its own");
    let servers = r#"{"parameter_server": {"servers": 2}}"#;
    check(refused_mode(servers, layout(|layout| layout.zero = 1)), "ZeRO has nothing to shard");
    check(
        refused_mode(servers, layout(|layout| (layout.data, layout.shares) = (2, Some(vec![3, 1])))),
        "equal parts of the batch",
    );
    check(refused_mode(servers, layout(|layout| layout.offload = Offload::Optimizer)), "in their own memory");
    check(refused_mode(servers, |plan| plan.precision = DataType::Fp16), "loss scale of workers");
    check(refused_mode(servers, |plan| plan.training.class_weights = vec![1.0; 4]), "do not know the labels");
    let compressed = r#"{"parameter_server": {"servers": 2, "compression": "int8"}}"#;
    check(refused_mode(compressed, |plan| plan.precision = DataType::Int8), "not a number format for training");
    let stale = r#"{"parameter_server": {"servers": 2, "staleness": 1}}"#;
    check(refused_mode(stale, layout(|layout| layout.tensor = 2)), "different versions of what all have");
    check(refused_mode(stale, |plan| plan.training.clip_norm = Some(1.0)), "no common norm");
    for more in [r#""staleness": 1"#, r#""backup_workers": 1"#] {
        let beside = format!(r#"{{"parameter_server": {{"servers": 4, {more}, "beside_workers": true}}}}"#);
        check(refused_mode(&beside, |_| {}), "would wait for that worker");
    }
    let backup = r#"{"parameter_server": {"servers": 2, "backup_workers": 1}}"#;
    check(refused_mode(backup, layout(|layout| layout.tensor = 2)), "different versions of what all have");
    check(refused_mode(backup, |plan| plan.training.clip_norm = Some(1.0)), "no common norm");
    let exponential = r#"{"decentralised": {"graph": "exponential"}}"#;
    let of_six = |plan: &mut Plan| (plan.layout.data, plan.global_batch) = (6, 6);
    check(refused_mode(exponential, of_six), "a power of two of replicas, and there are 6");
}

#[test]
fn servers_of_more_workers_than_memory_holds_are_refused() {
    let of = |workers: usize| move |plan: &mut Plan| (plan.layout.data, plan.global_batch) = (workers, workers);
    let check = |error: String, expected: &str| assert!(error.contains(expected), "{error}");
    let many = r#"{"parameter_server": {"servers": 1000}}"#;
    check(refused_mode(many, of(2000)), "1000 servers of 2000 workers make 2000000 connections, more than 1048576");
    // Their sessions know each other's buffers.
    for more in [r#""staleness": 1000000000000000000"#, r#""backup_workers": 1"#] {
        let stale = format!(r#"{{"parameter_server": {{"servers": 1, {more}}}}}"#);
        check(refused_mode(&stale, of(4096)), "4096 workers and 1 servers of `m` in 1 buckets have too many messages");
    }
}

#[test]
fn a_mode_reads_back_as_it_is_written() {
    for mode in [
        r#""synchronous""#,
        r#"{"local_sgd":{"every":50}}"#,
        r#"{"local_sgd":{"every":50,"outer":{"optimizer":"nesterov","learning_rate":0.5,"momentum":0.75}}}"#,
        r#"{"local_sgd":{"every":50,"fragments":4,"overlap":3,"mixing":0.25,"compression":"int8"}}"#,
        r#"{"decentralised":{"graph":"exponential","every":2}}"#,
        r#"{"parameter_server":{"servers":2,"staleness":0}}"#,
        r#"{"parameter_server":{"servers":2,"staleness":3}}"#,
        r#"{"parameter_server":{"servers":4,"staleness":"unbounded","beside_workers":true}}"#,
        r#"{"parameter_server":{"servers":2,"staleness":0,"compression":"int8"}}"#,
        r#"{"parameter_server":{"servers":2,"staleness":0,"backup_workers":2}}"#,
    ] {
        let read: Mode = serde_json::from_str(mode).expect("a mode");
        assert_eq!(serde_json::to_string(&read).expect("it is written"), mode);
    }
    let usual: Mode = serde_json::from_str(r#"{"local_sgd": {"every": 1, "outer": {"optimizer": "nesterov"}}}"#).expect("a mode");
    assert_eq!(usual.outer().map(|outer| (outer.learning_rate, outer.momentum)), Some((0.7, 0.9)));
    let [plain, all]: [Mode; 2] =
        [r#"{"local_sgd": {"every": 3, "outer": {}}}"#, r#"{"decentralised": {"graph": "complete", "every": 3}}"#]
            .map(|mode| serde_json::from_str(mode).expect("a mode"));
    assert_eq!(plain.normalised(), all.normalised());
    let usual: Mode =
        serde_json::from_str(r#"{"local_sgd": {"every": 9, "overlap": 2, "compression": "fp32"}}"#).expect("a mode");
    assert_eq!((usual.mixing(), usual.outer()), (0.5, Some(OuterOptimizer::default())));
}
