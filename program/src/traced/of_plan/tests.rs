use super::*;
use crate::plan::{AttentionKernel, LossKernel};
use crate::{Layout, Lora, NamePatterns, Recompute};
use foretell_models::operator_tables::ParameterRole;

fn job(change: impl Fn(&mut Plan)) -> Result<TracedPlan, Untraced> {
    let mut plan = Plan { precision: DataType::Bf16, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 8) };
    change(&mut plan);
    let tables = BTreeMap::from([("framework".to_owned(), "hf".to_owned())]);
    TracedPlan::new(&plan, &Model::named("llama3-8b").expect("it is in the zoo"), &tables)
}

fn with_targets(targets: &[&str]) -> Result<TracedPlan, Untraced> {
    job(|plan| plan.training.lora = Some(Lora { targets: targets.iter().copied().collect(), ..Lora::default() }))
}

#[test]
fn a_plan_is_traced_or_says_why_not() {
    assert!(job(|_| {}).expect("it was traced").assumptions.is_empty());
    let refused: [&dyn Fn(&mut Plan); 7] = [
        &|plan| plan.layout.tensor = 2,
        &|plan| (plan.layout.data, plan.layout.zero) = (8, 1),
        &|plan| plan.precision = DataType::Fp8,
        &|plan| plan.optimizer = Optimizer::Lamb,
        &|plan| plan.workload.base_bits = Some(4),
        &|plan| plan.layout.recompute = Recompute::Selective,
        &|plan| plan.workload.packed = Some(512),
    ];
    for (index, change) in refused.into_iter().enumerate() {
        assert!(job(change).is_err(), "change {index}");
    }
}

/// What a plan says of its optimizer counts: SGD's velocity and decay, and clipping under
/// torchtune, whose steps are in sixteen bits alone.
#[test]
fn the_recipe_of_an_optimizer_is_that_of_the_plan() {
    let sgd = |momentum, weight_decay| {
        let traced = job(|plan| {
            plan.optimizer = Optimizer::Sgd;
            (plan.training.momentum, plan.training.weight_decay) = (momentum, weight_decay);
        });
        traced.expect("it was traced").job.optimizer
    };
    assert_eq!(sgd(0.0, 0.0), TracedOptimizer::Sgd { momentum: false, decay: false });
    assert_eq!(sgd(0.9, 0.1), TracedOptimizer::Sgd { momentum: true, decay: true });
    let torchtune = |change: &dyn Fn(&mut Plan)| {
        let mut plan = Plan { precision: DataType::Bf16, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 8) };
        change(&mut plan);
        let tables = [("framework", "torchtune"), ("precision", "bf16"), ("loss", "model"), ("wrapper", "fsdp2")];
        let tables = tables.map(|(name, value)| (name.to_owned(), value.to_owned()));
        TracedPlan::new(&plan, &Model::named("llama3-8b").expect("it is in the zoo"), &BTreeMap::from(tables))
    };
    assert!(!torchtune(&|_| {}).expect("it was traced").job.clips_gradients);
    assert!(torchtune(&|plan| plan.training.clip_norm = Some(1.0)).expect("it was traced").job.clips_gradients);
    assert!(torchtune(&|plan| plan.precision = DataType::Fp32).is_err());
}

#[test]
fn deepspeed_shards_by_stage_and_casts_the_model() {
    let deepspeed = |zero: usize, data: usize, change: &dyn Fn(&mut Plan)| {
        let mut plan = Plan { precision: DataType::Bf16, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 8) };
        (plan.layout.zero, plan.layout.data) = (zero, data);
        change(&mut plan);
        let tables = [("framework", "hf"), ("wrapper", "deepspeed")].map(|(name, value)| (name.into(), value.into()));
        TracedPlan::new(&plan, &Model::named("llama3-8b").expect("it is in the zoo"), &BTreeMap::from(tables))
    };
    for (zero, data, stage) in [(0, 1, 1), (2, 1, 2), (1, 8, 1), (2, 8, 2), (3, 8, 3)] {
        let TracedPlan { job, assumptions } = deepspeed(zero, data, &|_| {}).expect("it was traced");
        assert_eq!((job.sharding, job.stored), (Sharding::Zero { stage }, Element::Bf16));
        assert!(job.table.key["precision"] == "bf16" && assumptions.is_empty(), "{assumptions:?}");
    }
    let adapters = deepspeed(3, 8, &|plan| plan.training.lora = Some(Lora::default())).expect("it was traced");
    assert!(adapters.job.table.key["precision"] == "bf16", "{:?}", adapters.job.table.key);
    assert!(deepspeed(0, 8, &|_| {}).is_err());
    assert!(deepspeed(2, 8, &|plan| plan.workload.no_master_copy = true).is_err());
}

#[test]
fn accelerates_fsdp2_casts_parameters_and_the_first_fsdp_has_autocast() {
    let sharded = |wrapper: Option<&str>, change: &dyn Fn(&mut Plan)| {
        let mut plan = Plan { precision: DataType::Bf16, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 8) };
        (plan.layout.zero, plan.layout.data) = (3, 8);
        change(&mut plan);
        let words = [("framework", Some("hf")), ("wrapper", wrapper)].into_iter();
        let tables = words.filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned()))).collect();
        TracedPlan::new(&plan, &Model::named("llama3-8b").expect("it is in the zoo"), &tables).expect("it was traced")
    };
    let whole: &dyn Fn(&mut Plan) = &|_| {};
    let adapters: &dyn Fn(&mut Plan) = &|plan| plan.training.lora = Some(Lora::default());
    let accelerate = |reduce| Sharding::Fsdp2 { reduce, groups: Fsdp2Groups::Accelerate };
    for (wrapper, change, sharding, precision, stored) in [
        (Some("accelerate-fsdp2"), whole, accelerate(Element::Bf16), "bf16", Element::F32),
        (Some("accelerate-fsdp2"), adapters, accelerate(Element::Bf16), "bf16", Element::F32),
        (
            Some("accelerate-fsdp2"),
            &|plan: &mut Plan| plan.workload.no_master_copy = true,
            accelerate(Element::Bf16),
            "bf16",
            Element::Bf16,
        ),
        (
            Some("accelerate-fsdp2"),
            &|plan: &mut Plan| plan.precision = DataType::Fp32,
            accelerate(Element::F32),
            "fp32",
            Element::F32,
        ),
        (None, whole, Sharding::Fsdp1, "mixed", Element::F32),
        (None, adapters, Sharding::Fsdp1, "mixed", Element::F32),
    ] {
        let TracedPlan { job, .. } = sharded(wrapper, change);
        assert_eq!((job.sharding, &*job.table.key["precision"], job.stored), (sharding, precision, stored));
    }
    let narrow = sharded(Some("accelerate-fsdp2"), adapters).job.table;
    assert!(narrow.key["adapter"].ends_with("-bf16"), "{:?}", narrow.key);
}

#[test]
fn adapters_on_some_layers_are_said_to_be_predicted_as_on_all() {
    assert!(with_targets(&["*"]).expect("traced").assumptions.is_empty());
    assert!(with_targets(&["*attn*"]).expect("traced").assumptions.is_empty());
    let fewer = with_targets(&["*q_proj", "*v_proj"]).expect("traced").assumptions;
    assert!(fewer.len() == 1 && fewer[0].contains("some of attention's layers"), "{fewer:?}");
    let pattern = NamePatterns::from_iter(["*"]);
    assert!(pattern.match_name("model.layers.0.self_attn.q_proj"));
}

#[test]
fn mixtures_of_release_4_run_their_experts_in_a_loop() {
    let mixture = |version: Option<&str>, change: &dyn Fn(&mut Plan)| {
        let mut plan = Plan { precision: DataType::Bf16, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 8) };
        change(&mut plan);
        let words = [("framework", Some("hf")), ("version", version)].into_iter();
        let tables = words.filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned()))).collect();
        TracedPlan::new(&plan, &Model::named("mixtral-8x7b").expect("it is in the zoo"), &tables).expect("it was traced")
    };
    let whole: &dyn Fn(&mut Plan) = &|_| {};
    let all: &dyn Fn(&mut Plan) = &|plan| plan.training.lora = Some(Lora::default());
    let of_attention: &dyn Fn(&mut Plan) =
        &|plan| plan.training.lora = Some(Lora { targets: ["*attn*"].into_iter().collect(), ..Lora::default() });
    for change in [whole, all, of_attention] {
        let TracedPlan { job, assumptions } = mixture(Some("4.48"), change);
        assert_eq!((&*job.table.key["experts"], &*job.table.key["version"]), ("eager", "4.48"));
        assert!(assumptions.is_empty(), "{assumptions:?}");
        let elements = job.table.elements(&job.sizes).expect("sizes are given");
        let elements =
            job.table.parameters.iter().zip(elements).filter(|(parameter, _)| parameter.role != ParameterRole::Adapter);
        let parameters: f64 = elements.map(|(_, (elements, count))| elements as f64 * count as f64).sum();
        assert!((parameters / 46.703e9 - 1.0).abs() < 1e-3, "{parameters}");
        let TracedPlan { job, assumptions } = mixture(None, change);
        assert!(job.table.key["experts"] == "grouped_mm" && assumptions.is_empty(), "{assumptions:?}");
    }
    let TracedPlan { job, assumptions } = mixture(Some("4.48"), &|plan| plan.workload.loss = LossKernel::Liger);
    assert_eq!(job.table.key["experts"], "grouped_mm");
    assert!(assumptions.iter().any(|sentence| sentence.contains("experts in a loop")), "{assumptions:?}");
}

#[test]
fn four_bits_need_a_quarter_of_what_sixteen_do_and_eight_a_half() {
    let of_role = |plan: &TracedPlan| -> f64 {
        let elements = plan.job.table.elements(&plan.job.sizes).expect("sizes are given");
        let parameters = plan.job.table.parameters.iter().zip(elements);
        let linear = parameters.filter(|(parameter, _)| parameter.name.ends_with("down_proj.weight"));
        linear.map(|(parameter, (elements, count))| (elements * parameter.element.bytes()) as f64 * count as f64).sum()
    };
    let lora = with_targets(&["*"]).expect("traced");
    let qlora = job(|plan| {
        plan.training.lora = Some(Lora::default());
        plan.workload.base_bits = Some(4);
    });
    let ratio = of_role(&qlora.expect("traced")) / of_role(&lora);
    assert!((ratio - 0.25).abs() < 1e-6, "{ratio}");
    let eight_bits = job(|plan| {
        plan.training.lora = Some(Lora::default());
        plan.workload.base_bits = Some(8);
    });
    let ratio = of_role(&eight_bits.expect("traced")) / of_role(&lora);
    assert!((ratio - 0.5).abs() < 1e-6, "{ratio}");
}

#[test]
fn adapters_that_no_table_has_in_sixteen_bits_are_said_to_be_wide() {
    let sharded = |model: &str, wrapper: &str, change: &dyn Fn(&mut Plan)| {
        let mut plan = Plan { precision: DataType::Bf16, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 8) };
        (plan.layout.zero, plan.layout.data) = (3, 8);
        plan.training.lora = Some(Lora::default());
        change(&mut plan);
        let tables = [("framework", "hf"), ("wrapper", wrapper)].map(|(name, value)| (name.into(), value.into()));
        TracedPlan::new(&plan, &Model::named(model).expect("it is in the zoo"), &BTreeMap::from(tables)).expect("it was traced")
    };
    let is_said = |traced: &TracedPlan| traced.assumptions.iter().any(|sentence| sentence.contains("cast to sixteen bits"));
    for wrapper in ["accelerate-fsdp2", "deepspeed"] {
        let exact = sharded("llama3-8b", wrapper, &|_| {});
        assert!(exact.job.table.key["adapter"] == "lora-all-bf16" && !is_said(&exact), "{:?}", exact.assumptions);
        // Dropout was not traced with it, nor was the model below.
        let dropout = sharded("llama3-8b", wrapper, &|plan| plan.workload.adapter_dropout = true);
        assert!(dropout.job.table.key["adapter"] == "lora-all-bf16" && !is_said(&dropout), "{:?}", dropout.assumptions);
        assert!(dropout.assumptions.iter().any(|sentence| sentence.contains("`lora-all-dropout`")), "{:?}", dropout.assumptions);
        let flash = sharded("llama3-8b", wrapper, &|plan| {
            (plan.workload.adapter_dropout, plan.workload.attention) = (true, Some(AttentionKernel::Flash));
        });
        assert!(flash.job.table.key["adapter"] == "lora-all-dropout" && is_said(&flash), "{:?}", flash.assumptions);
        let other = sharded("deepseek-v2-lite", wrapper, &|_| {});
        assert!(other.job.table.key["adapter"] == "lora-all" && is_said(&other), "{:?}", other.assumptions);
        let whole = sharded("deepseek-v2-lite", wrapper, &|plan| plan.training.lora = None);
        assert!(!is_said(&whole), "{:?}", whole.assumptions);
    }
}

#[test]
fn runs_that_stop_under_accelerates_fsdp2_are_named() {
    let stops = |model: &str, zero: usize, change: &dyn Fn(&mut Plan)| {
        let mut plan = Plan { precision: DataType::Bf16, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 8) };
        (plan.layout.zero, plan.layout.data) = (zero, 8);
        change(&mut plan);
        let tables = [("framework", "hf"), ("wrapper", "accelerate-fsdp2")].map(|(name, value)| (name.into(), value.into()));
        let model = Model::named(model).expect("it is in the zoo");
        let traced = TracedPlan::new(&plan, &model, &BTreeMap::from(tables)).expect("it was traced");
        traced.assumptions.iter().any(|sentence| sentence.contains("stops in its first step"))
    };
    let liger: &dyn Fn(&mut Plan) = &|plan| plan.workload.loss = LossKernel::Liger;
    let adapters: &dyn Fn(&mut Plan) =
        &|plan| (plan.workload.loss, plan.training.lora) = (LossKernel::Liger, Some(Lora::default()));
    assert!(stops("llama3-8b", 3, adapters) && !stops("llama3-8b", 0, adapters));
    assert!(!stops("llama3-8b", 3, liger));
    assert!(stops("bert-large-uncased", 3, &|_| {}) && !stops("bert-large-uncased", 0, &|_| {}));
}

#[test]
fn heads_that_share_weights_have_tables_of_each_loss() {
    let tied = |wrapper: Option<&str>, change: &dyn Fn(&mut Plan)| {
        let mut plan = Plan { precision: DataType::Bf16, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 8) };
        (plan.layout.zero, plan.layout.data) = if wrapper.is_some() { (3, 8) } else { (0, 1) };
        change(&mut plan);
        let words = [("framework", Some("hf")), ("wrapper", wrapper)].into_iter();
        let tables = words.filter_map(|(name, value)| Some((name.to_owned(), value?.to_owned()))).collect();
        TracedPlan::new(&plan, &Model::named("qwen2.5-0.5b").expect("it is in the zoo"), &tables).expect("it was traced")
    };
    for loss in [LossKernel::Plain, LossKernel::Chunked, LossKernel::Liger] {
        for (wrapper, has_adapters) in
            [(None, false), (None, true), (Some("accelerate-fsdp2"), false), (Some("accelerate-fsdp2"), true)]
        {
            let traced = tied(wrapper, &|plan| {
                plan.workload.loss = loss;
                plan.training.lora = has_adapters.then(Lora::default);
            });
            let stands_in =
                traced.assumptions.iter().any(|sentence| sentence.contains("stands in") || sentence.contains("stand in"));
            assert!(traced.job.table.key["head"] == "tied" && !stands_in, "{loss:?}: {:?}", traced.assumptions);
        }
    }
}

#[test]
fn muon_is_pytorchs_where_matrices_are_whole() {
    let muon = job(|plan| plan.optimizer = Optimizer::Muon).expect("it was traced");
    assert_eq!(muon.job.optimizer, TracedOptimizer::Muon);
    assert!(muon.assumptions.iter().any(|sentence| sentence.contains("`torch.optim.Muon`")), "{:?}", muon.assumptions);
    assert!(job(|plan| (plan.optimizer, plan.layout.data) = (Optimizer::Muon, 8)).is_ok());
    let sharded = job(|plan| (plan.optimizer, plan.layout.data, plan.layout.zero) = (Optimizer::Muon, 8, 3));
    assert!(sharded.expect_err("it is refused").reason.contains("muon"));
    assert!(job(|plan| (plan.optimizer, plan.workload.updates_in_backward) = (Optimizer::Muon, true)).is_err());
}
