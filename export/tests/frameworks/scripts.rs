//! Shell scripts of Megatron-LM: what they start is found, branches on their own variables are
//! decided, and what is not known is named.

use foretell_export::{ImportedPlan, PlanForm, Surroundings, import_plan};
use foretell_models::Model;
use foretell_units::DataType;
use foretell_units::diagnostic::one_line;

const MODEL: &str = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 1024 --max-position-embeddings 1024 \
                     --micro-batch-size 1 --global-batch-size 64";

fn read(text: &str) -> Result<ImportedPlan, String> {
    import_plan(text, PlanForm::MegatronArguments, 8).map_err(|error| one_line(&error))
}

fn launch(more: &str) -> String {
    format!("torchrun pretrain_gpt.py {MODEL} --vocab-size 32000 {more}\n")
}

#[track_caller]
fn refused(text: &str, expected: &[&str]) {
    let error = read(text).map(|imported| imported.plan).expect_err(text);
    assert!(expected.iter().all(|part| error.contains(part)) && error.contains("hint: "), "{text}: {error}");
}

#[test]
fn arguments_in_variables_are_read_without_a_launch() {
    let array = format!("N=4\nMODEL_ARGS=(\n  {MODEL}\n  --vocab-size 32000\n)\nOTHER=\"--bf16 --lr 1e-4\"\n");
    let imported = read(&array).expect("it is sound");
    assert_eq!((imported.plan.precision, imported.plan.global_batch), (DataType::Bf16, 64));
    assert!(imported.assumed.iter().any(|note| note.contains("`MODEL_ARGS`, `OTHER`")), "{:?}", imported.assumed);
    refused(&array.replace("--seq-length 1024", ""), &["`--seq-length`", "`--sequence`"]);
    let asked = Surroundings { sequence: Some(512), ..Surroundings::from(8) };
    let imported = import_plan(&array.replace("--seq-length 1024", ""), PlanForm::MegatronArguments, asked).expect("it is said");
    assert_eq!(imported.model.and_then(|model| model.sample().tokens()).map(|(length, _)| length), Some(512));
    let of_loop = format!("for i in $ROUNDS; do F=$F,1; done\n{}", launch("--bf16 --swiglu --num-experts 8 --moe-layer-freq $F"));
    refused(&of_loop, &["`$F`", "branch"]);
    refused("megatron rlhf --model org/name --micro_batch_size 1\n", &["`megatron rlhf`", "--method dpo"]);
    refused("llamafactory-cli train job.yaml\n", &["`llamafactory-cli train`", "`job.yaml`"]);
}

#[test]
fn branches_on_a_scripts_own_variables_are_decided() {
    let script = |condition: &str| {
        format!(
            "DTYPE=fp8\nN=8\nEMPTY=\"\"\nARGS=(--bf16)\nif {condition}; then\n  ARGS+=(--fp8-format hybrid)\nelse\n  ARGS+=(--sequence-parallel)\nfi\n{}",
            launch("${ARGS[@]}")
        )
    };
    for condition in [
        "[[ \"$DTYPE\" == \"fp8\" ]]",
        "[ $N -gt 4 ]",
        "[ -z \"$EMPTY\" ]",
        "! [ -n \"$EMPTY\" ]",
        "[ $N -eq 8 ] && [ -n \"$DTYPE\" ]",
        "[ $N = 9 ] || true",
    ] {
        let plan = read(&script(condition)).expect(condition).plan;
        assert_eq!((plan.precision, plan.layout.sequence_parallel), (DataType::Fp8, false), "{condition}");
    }
    for condition in ["[[ \"$DTYPE\" == \"bf16\" ]]", "[ $N -lt 4 ]", "false", "[ $N -eq 8 ] && [ -z \"$DTYPE\" ]"] {
        let plan = read(&script(condition)).expect(condition).plan;
        assert_eq!((plan.precision, plan.layout.sequence_parallel), (DataType::Bf16, true), "{condition}");
    }
    // What lies outside decides nothing, and the variable is named.
    for condition in ["[ -f file ]", "[ -n \"$FROM_OUTSIDE\" ]", "grep -q x file"] {
        refused(&script(condition), &["`$ARGS`", "branch", "--fp8-format"]);
    }
    let plan =
        read(&format!("ARGS=--bf16\n[ -n \"$ARGS\" ] && ARGS=\"$ARGS --swiglu\"\nfalse && ARGS=--fp16\n{}", launch("$ARGS")))
            .expect("it is sound")
            .plan;
    assert_eq!(plan.precision, DataType::Bf16);
    let chain =
        format!("D=b\nif [ $D = a ]; then\n  X=--fp16\nelif [ $D = b ]; then\n  X=--bf16\nelse\n  X=\nfi\n{}", launch("$X"));
    assert_eq!(read(&chain).expect("it is sound").plan.precision, DataType::Bf16);
}

#[test]
fn a_command_that_a_branch_extends_is_kept() {
    let command = format!("CMD=\"python3 $D/pretrain_gpt.py {MODEL} --vocab-size 32000 --bf16\"\n");
    let run = "srun bash -c \"RANK=\\$SLURM_PROCID $CMD\"\n";
    let imported =
        read(&format!("{command}if [ -n \"$WANDB\" ]; then\n  CMD=\"$CMD --wandb-project x\"\nfi\n{run}")).expect("it is sound");
    assert_eq!(imported.plan.precision, DataType::Bf16);
    assert!(imported.assumed.iter().any(|note| note.contains("--wandb-project")), "{:?}", imported.assumed);
    let deciding = format!("{command}if [ -n \"$MORE\" ]; then\n  CMD=\"$CMD --num-experts 8\"\nfi\n{run}");
    refused(&deciding, &["`$CMD`", "branch"]);
}

#[test]
fn other_models_scripts_are_refused_by_name() {
    for name in ["pretrain_bert.py", "pretrain_t5.py", "pretrain_vlm.py", "pretrain_mamba.py"] {
        refused(&launch("--bf16").replace("pretrain_gpt.py", name), &[name]);
    }
    assert!(read(&launch("--bf16").replace("pretrain_gpt.py", "train.py")).is_ok());
    for setting in ["--grpo-group-size 16", "--rollout-batch-size 32", "--advantage-estimator grpo", "--perform-rl-step"] {
        refused(&launch(&format!("--bf16 {setting}")), &[setting, "by rewards"]);
    }
}

#[test]
fn sizes_of_experts_lay_out_nothing_without_experts() {
    let sizes = "--bf16 --tensor-model-parallel-size 2 --expert-model-parallel-size 1 --expert-tensor-parallel-size 1";
    let plan = read(&launch(sizes)).expect("it is sound").plan;
    assert_eq!((plan.layout.tensor, plan.layout.expert, plan.layout.data), (2, 1, 4));
    refused(&launch(&format!("{sizes} --num-experts 8")), &["Megatron lays them out so, and no plan does"]);
}

#[test]
fn known_tokenizers_have_their_vocabulary_and_others_are_asked_for() {
    let arguments = |more: &str| format!("{MODEL} --bf16 --swiglu {more}");
    let vocab = |imported: ImportedPlan| imported.model.and_then(|model| Some(model.as_decoder()?.vocab));
    for (more, expected) in [
        ("--tokenizer-type Llama2Tokenizer --tokenizer-model t", 32_000),
        ("--vocab-file data/gpt2-vocab.json", 50_257),
        ("--tokenizer-type HuggingFaceTokenizer --tokenizer-model meta-llama/Llama-3.1-8B-Instruct", 128_256),
    ] {
        let imported = read(&arguments(more)).expect(more);
        assert!(imported.assumed.iter().any(|note| note.contains(&expected.to_string())), "{more}");
        assert_eq!(vocab(imported), Some(expected), "{more}");
    }
    let unknown = arguments("--tokenizer-type HuggingFaceTokenizer --tokenizer-model org/other");
    refused(&unknown, &["`--vocab`"]);
    let asked = Surroundings { vocab: Some(999), ..Surroundings::from(8) };
    let read_asked = |text: &str| import_plan(text, PlanForm::MegatronArguments, asked);
    assert_eq!(vocab(read_asked(&unknown).expect("it is sound")), Some(999));
    assert!(one_line(&read_asked(&arguments("--vocab-size 32000")).expect_err("it is stated")).contains("`--vocab`"));
}

#[test]
fn older_names_of_recomputation_are_read() {
    let recompute = |more: &str| read(&launch(more)).expect(more).plan.layout.recompute;
    let full = recompute("--bf16 --recompute-granularity full --recompute-method uniform");
    assert_eq!(recompute("--bf16 --checkpoint-activations"), full);
    assert_eq!(recompute("--bf16 --activations-checkpoint-method uniform"), full);
}

#[test]
fn lists_that_loops_build_are_read() {
    let launched = launch("${ARGS[@]}");
    let plan =
        |script: &str| read(&format!("{script}\n{launched}")).unwrap_or_else(|error| unreachable!("{script}: {error}")).plan;
    let looped = plan("ARGS=()\nfor flag in --bf16 --sequence-parallel; do\n  ARGS+=(\"$flag\")\ndone");
    assert_eq!((looped.precision, looped.layout.sequence_parallel), (DataType::Bf16, true));
    let nested =
        plan("for a in bf; do for b in 16 ; do ARGS+=(--$a$b); done; done; if true; then ARGS+=(--sequence-parallel); fi");
    assert_eq!((nested.precision, nested.layout.sequence_parallel), (DataType::Bf16, true));
    let words = plan("NAMES=\"bf16 sequence-parallel\"\nfor name in $NAMES\ndo\n  ARGS+=(--$name)\ndone");
    assert_eq!((words.precision, words.layout.sequence_parallel), (DataType::Bf16, true));
    // What a loop over files adds is not known.
    refused(&format!("for one in *.txt; do ARGS+=(--bf16); done\n{launched}"), &["branch or loop"]);
}

#[test]
fn loops_over_a_scripts_own_arguments_end_at_once() {
    for (first, last) in
        [("until [ -z \"$1\" ]; do", "done"), ("while getopts \"t:p:\" opt; do", "done"), ("for arg in \"$@\"; do", "done")]
    {
        let script = format!(
            "TP=2\n{first}\n  case $1 in --tp) TP=$2; shift ;; esac\n  shift\n{last}\n{}",
            launch("--bf16 --tensor-model-parallel-size $TP")
        );
        assert_eq!(read(&script).expect(first).plan.layout.tensor, 2, "{first}");
    }
    // Another condition may hold.
    let other = format!("TP=2\nuntil [ -f done ]; do TP=4; done\n{}", launch("--bf16 --tensor-model-parallel-size $TP"));
    assert!(read(&other).is_err());
}

#[test]
fn a_default_may_be_another_variable_and_a_sum_that_of_expr() {
    let size = |assignments: &str| {
        let script = format!("{assignments}\n{}", launch("--bf16 --tensor-model-parallel-size $TP"));
        read(&script).map(|imported| imported.plan.layout.tensor)
    };
    assert_eq!(size("N=4\nTP=${1:-$N}").ok(), Some(4));
    assert_eq!(size("N=4\nTP=${MINE:-${N}}").ok(), Some(4));
    assert_eq!(size("N=4\nTP=$(expr 8 / $N)").ok(), Some(2));
    assert_eq!(size("N=2\nTP=$(expr $N \\* 2)").ok(), Some(4));
    assert!(size("TP=$(expr $MINE / 2)").is_err() && size("TP=${1:-$MINE}").is_err() && size("TP=$(exprs 8 / 4)").is_err());
}

#[test]
fn a_variable_that_only_undone_branches_assign_is_empty() {
    let script = |condition: &str, more: &str| {
        format!("OFF=false\nif {condition}; then\n  o=\"--use-distributed-optimizer\"\nfi\n{}", launch(&format!("--bf16 {more}")))
    };
    for more in ["$o", "\"$o\"", "--save /s $o", "${o}"] {
        let plan = read(&script("[ $OFF != false ]", more)).expect(more).plan;
        assert_eq!((plan.layout.zero, plan.precision), (0, DataType::Bf16), "{more}");
    }
    assert_eq!(read(&script("[ $OFF = false ]", "$o")).expect("it is sound").plan.layout.zero, 1);
    refused(&script("[ -f x ]", "$o"), &["`$o`", "branch"]);
}

#[test]
fn an_evaluated_command_has_its_quotes_and_redirections_taken_out() {
    for end in ["&> out.log", "2>&1 | tee out.log", "&>> log", "> out.log 2>&1", ""] {
        let command = format!(
            "moe=\"--num-experts 8 --moe-layer-freq '([1]*4)'\"\ncmd=\"{} $moe {end}\"\n",
            launch("--swiglu --bf16").trim()
        );
        for run in ["eval $cmd", "eval \"$cmd\"", "eval ${cmd}"] {
            let imported = read(&format!("{command}{run}\n")).expect(run);
            assert_eq!(imported.plan.precision, DataType::Bf16, "{run} {end}");
            assert_eq!(imported.unread, Vec::<String>::new(), "{run} {end}");
        }
    }
    read("c='eval $c'\neval $c\n").expect_err("it never ends");
}

#[test]
fn layers_of_each_stage_are_a_list_of_whole_numbers_or_refused() {
    const JOB: &str = "torchrun pretrain_gpt.py --num-layers 16 --hidden-size 1024 --num-attention-heads 8 --seq-length 1024 \
                       --max-position-embeddings 1024 --micro-batch-size 1 --global-batch-size 64 --vocab-size 32000 --bf16 --swiglu \
                       --pipeline-model-parallel-size 2 --num-layer-list";
    let read = |list: &str| {
        import_plan(&format!("{JOB} {list}"), PlanForm::MegatronArguments, Surroundings::from(8))
            .map_err(|error| one_line(&error))
    };
    let imported = read("6,10").expect("it is sound");
    assert!(imported.plan.layout.cuts.is_some());
    for wrong in ["8,x,8", "0,16", "6,9", "18446744073709551615,17", "6,10 --decoder-first-pipeline-num-layers 8"] {
        assert!(read(wrong).expect_err(wrong).contains("--num-layer-list"), "{wrong}");
    }
    // Megatron's width of a gated network is a multiple of 64.
    let decoder = imported.model.as_ref().and_then(Model::as_decoder).expect("a decoder");
    assert_eq!(decoder.ffn, 2688);
}
