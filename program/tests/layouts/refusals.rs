//! Refused plans and their messages.

use super::*;

/// The message of a refused plan.
fn refusal(model: &Model, plan: &Plan) -> String {
    let error = compile(model, "m", plan).expect_err("a plan that does not fit").to_string();
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
        (small.clone(), plan(layout.clone(), 1 << 30), "raise `micro_batch`"),
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
                let error = error.to_string();
                assert!(error.contains(expected) && error.contains("; hint: "), "{error}");
            }
        }
    }
}

#[test]
fn meaningless_optimizer_parameters_are_refused() {
    let model = Model::Mlp(Mlp { widths: vec![8, 8, 4] });
    let usual = Training::default();
    let cases = [
        ("learning_rate", Training { learning_rate: Some(f32::NAN), ..usual }),
        ("learning_rate", Training { learning_rate: Some(-0.1), ..usual }),
        ("momentum", Training { momentum: f32::INFINITY, ..usual }),
        ("weight_decay", Training { weight_decay: -1.0, ..usual }),
        ("beta1", Training { beta1: 1.0, ..usual }),
        ("beta2", Training { beta2: f32::NAN, ..usual }),
        ("epsilon", Training { epsilon: 0.0, ..usual }),
    ];
    for (field, training) in cases {
        let plan = Plan { training, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 4) };
        assert!(matches!(compile(&model, "m", &plan), Err(PlanError::Invalid { .. })));
        assert!(refusal(&model, &plan).starts_with(&format!("`training.{field}`: ")), "{field}");
    }
    let zero = Training { learning_rate: Some(0.0), momentum: 0.0, beta1: 0.0, ..usual };
    assert!(compile(&model, "m", &Plan { training: zero, ..Plan::new(Layout::default(), 4) }).is_ok());
}
