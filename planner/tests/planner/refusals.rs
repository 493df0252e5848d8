//! Requests without an answer get an error that says why.

use crate::common::{DGX, GptSizes, fixed, profile, short_gpt};
use foretell_models::Model;
use foretell_planner::{PlannerError, Request, plan};
use foretell_program::{Layout, Offload, Optimizer, Plan, Stack, compile};
use foretell_simulator::{CostModel, Stop};
use foretell_units::diagnostic::one_line;
use foretell_units::{Bytes, DataType};

/// Returns the error of a request that `change` makes impossible.
fn refusal(change: impl Fn(&mut Request<'_>)) -> PlannerError {
    let costs = CostModel::new(None, &DGX);
    let model = Model::named("mlp").expect("in the zoo");
    let base = Plan::new(Layout::default(), 256);
    let mut request = Request::new(&model, "mlp", &DGX, &costs, &base);
    change(&mut request);
    plan(&request).expect_err("it has no answer")
}

#[test]
fn an_error_names_the_least_memory_that_would_do() {
    let error = refusal(|request| request.memory_limit = Some("1MB".parse().expect("a size")));
    assert!(matches!(&error, PlannerError::OutOfMemory { needed, limit, .. } if needed > limit), "{error}");
    let text = one_line(&error);
    assert!(text.starts_with("no layout fits: the smallest needs "), "{text}");
    assert!(text.contains("on a device of `a100") && text.contains("which has 977 KiB; hint: use more devices"), "{text}");
}

/// DDP splits nothing, and FSDP not the model.
#[test]
fn a_stack_that_cannot_split_a_model_is_named_with_one_that_can() {
    let costs = CostModel::new(None, &DGX);
    let model = Model::named("mlp").expect("in the zoo");
    for (stack, wider) in [("ddp", "--stack fsdp"), ("fsdp", "--stack megatron-core")] {
        let base = Plan { stack: Stack::new(stack), ..Plan::new(Layout::default(), 256) };
        let memory_limit = Some("1050KB".parse().expect("a size"));
        let text = plan(&Request { memory_limit, ..Request::new(&model, "mlp", &DGX, &costs, &base) }).expect_err("too large");
        assert!(one_line(&text).contains(wider), "{text}");
    }
}

#[test]
fn a_model_whose_state_alone_is_too_large_is_refused_before_the_search() {
    let costs = CostModel::new(None, &DGX);
    let model = short_gpt(4, 131_072, 256, true);
    let base = Plan { precision: DataType::Bf16, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 512) };
    let request = Request { give_up: Stop::when(|| true), ..Request::new(&model, "huge", &DGX, &costs, &base) };
    let text = one_line(&plan(&request).expect_err("too large"));
    // Each of 4 blocks has 12 squares of the width, of 6 bytes each, over eight devices. Optimizer
    // state may lie on the hosts.
    assert!(text.starts_with("no layout fits: the smallest needs 576 GiB on a device of `a100"), "{text}");
    assert!(
        text.contains("hint: parameters and gradients alone are 4.5 TiB: use more devices than 8, or a smaller model"),
        "{text}"
    );
}

#[test]
fn a_layout_that_just_fits_is_not_refused_for_the_models_state() {
    let costs = CostModel::new(None, &DGX);
    // Little memory beside parameters.
    let model = short_gpt(8, 4096, 64, true);
    for (precision, optimizer, zero, offload) in [
        (DataType::Fp32, Optimizer::Sgd, 3, Offload::None),
        (DataType::Bf16, Optimizer::AdamW, 3, Offload::None),
        (DataType::Bf16, Optimizer::Adam, 2, Offload::Optimizer),
        (DataType::Bf16, Optimizer::Sgd, 0, Offload::None),
    ] {
        let layout = Layout { data: if zero > 0 { 4 } else { 1 }, tensor: 2, zero, offload, ..Layout::default() };
        let base = Plan { precision, optimizer, ..Plan::new(Layout::default(), 4) };
        let compiled = compile(&model, "model", &Plan { layout: layout.clone(), ..base.clone() }).expect("it divides the model");
        let choices = format!("data={},tensor=2,pipeline=1,zero={zero},micro_batch=1,offload={}", layout.data, offload.name());
        let memory_limit = compiled.arenas().into_iter().max();
        let (fixed, devices) = (fixed(&choices), layout.data * 2);
        let request = Request { fixed, devices, memory_limit, ..Request::new(&model, "model", &DGX, &costs, &base) };
        let planned = plan(&request);
        assert!(planned.is_ok(), "{precision:?}, ZeRO {zero}: {}", planned.expect_err("it is not Ok"));
    }
}

#[test]
fn a_search_that_is_given_up_says_so() {
    let costs = CostModel::new(None, &DGX);
    let model = short_gpt(4, 256, 64, true);
    let base = Plan::new(Layout::default(), 64);
    // Nothing fits, so there is no first answer. The search ends before it knows that.
    let memory_limit = Some("4MB".parse().expect("a size"));
    let request = Request { give_up: Stop::when(|| true), memory_limit, ..Request::new(&model, "model", &DGX, &costs, &base) };
    let error = plan(&request).expect_err("nothing fits");
    assert!(matches!(error, PlannerError::OutOfTime { .. }), "{error}");
    assert!(one_line(&error).contains("hint: allow more time, or `--fix` some of the layout"), "{error}");
}

#[test]
fn impossible_sizes_are_refused_at_once() {
    let text = one_line(&refusal(|request| request.devices = usize::MAX));
    assert!(text.contains("more than 1048576 are not laid out); hint: use fewer nodes"), "{text}");
    let text = one_line(&refusal(|request| request.fixed = fixed("data=3,tensor=3,pipeline=1")));
    assert!(text.contains("divides 8 devices as asked (the fixed sizes make 9 ranks); hint: "), "{text}");
    let costs = CostModel::new(None, &DGX);
    let model = Model::named("mlp").expect("in the zoo");
    let base = Plan::new(Layout::default(), usize::MAX);
    let text = one_line(&plan(&Request::new(&model, "mlp", &DGX, &costs, &base)).expect_err("too many samples"));
    assert!(text.contains("a step has 4294967296 samples at most"), "{text}");
}

#[test]
fn an_error_names_the_fixed_fields_that_contradict_the_request() {
    let model = GptSizes { layers: 4, hidden: 64, heads: 4, vocab: 512, sequence: 64, tied_embeddings: false }.model();
    let base = Plan { precision: DataType::Bf16, optimizer: Optimizer::AdamW, ..Plan::new(Layout::default(), 8) };
    let costs = CostModel::new(None, &DGX);
    let two_chunks = crate::common::schedule(|schedule| !schedule.allows(1));
    for (choices, reason) in [
        ("data=4,tensor=4".to_owned(), "the fixed sizes make 16 ranks"),
        ("pipeline=8".to_owned(), "a pipeline of 8 chunks is fixed, and the model has 6 blocks"),
        (format!("pipeline=4,virtual_stages=2,schedule={two_chunks}"), "a pipeline of 8 chunks is fixed"),
        ("micro_batch=3".to_owned(), "a micro-batch of 3 samples over all ranks is fixed, which does not divide 8"),
    ] {
        let request = Request { fixed: fixed(&choices), ..Request::new(&model, "model", &DGX, &costs, &base) };
        let text = one_line(&plan(&request).expect_err("it has no answer"));
        assert!(text.contains(reason) && text.contains("hint: "), "{choices}: {text}");
    }
}

#[test]
fn a_profile_of_another_device_does_not_apply() {
    let costs = CostModel::new(Some(&profile("another", vec![1.0, 2.0])), &DGX);
    assert!(costs.paces.is_empty() && costs.buffered == Bytes::ZERO);
    let device = &DGX.device_kinds()[0].name;
    let costs = CostModel::new(Some(&profile(device, vec![0.5, f64::NAN, 1.0, 2.0])), &DGX);
    assert_eq!(costs.paces, [1.0, 1.0, 2.0]);
    assert_eq!(costs.buffered, Bytes::new(4096));
}

#[test]
fn a_fixed_size_that_divides_nothing_is_refused_with_those_that_do() {
    let model = short_gpt(6, 64, 64, true);
    let text = refusal(|request| {
        request.model = Box::leak(Box::new(model.clone()));
        request.fixed = fixed("tensor=7");
        // A search would not even begin.
        request.give_up = Stop::when(|| true);
    });
    let text = one_line(&text);
    assert!(text.contains("4 heads of attention are not divisible by tensor (7); `tensor` may be 1, 2, 4)"), "{text}");
    assert!(text.contains("`--fix` another `tensor`, or leave it open"), "{text}");
}
