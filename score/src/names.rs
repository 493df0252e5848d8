//! Maps the names of devices, links, frameworks and formats in rows to names of profiles.

use crate::row::Row;
use foretell_program::LossKernel;
use foretell_simulator::gpu::{Fp8Scaling, ProductFormat};

/// Profile names by the words that must all occur in a row's text ([`has_word`]). The first match
/// is used.
type Names = [(&'static [&'static str], &'static str)];

const DEVICES: &Names = &[
    (&["v100", "16gb"], "v100-sxm-16g"),
    (&["v100", "sxm3"], "v100-sxm3-32g"),
    (&["v100", "pcie"], "v100-pcie-32g"),
    (&["v100"], "v100-sxm-32g"),
    (&["a100", "pcie", "40gb"], "a100-pcie-40g"),
    (&["a100", "pcie"], "a100-pcie-80g"),
    (&["a100", "40gb"], "a100-sxm-40g"),
    (&["a100-40"], "a100-sxm-40g"),
    (&["a100"], "a100-sxm-80g"),
    (&["a800"], "a800-sxm-80g"),
    (&["a10g"], "a10g"),
    (&["a30"], "a30"),
    (&["a40"], "a40"),
    (&["h100", "pcie"], "h100-pcie-80g"),
    (&["h100", "500w"], "h100-sxm-96g-500w"),
    (&["gh200"], "gh200-96g"),
    (&["h100"], "h100-sxm-80g"),
    (&["h200"], "h200-sxm-141g"),
    (&["gb200"], "gb200"),
    (&["gb300"], "gb300"),
    (&["b200"], "b200-sxm-180g"),
    (&["b300"], "b300-sxm-288g"),
    (&["l40s"], "l40s"),
    (&["l40"], "l40"),
    (&["l4"], "l4"),
    (&["t4"], "t4"),
    (&["mi100"], "mi100"),
    (&["mi210"], "mi210"),
    (&["mi250"], "mi250"),
    (&["mi300"], "mi300x"),
    (&["mi325"], "mi325x"),
    (&["mi355"], "mi355x"),
    (&["h800"], "h800-sxm-80g"),
    (&["h20"], "h20"),
    (&["a5000"], "rtx-a5000"),
    (&["a6000"], "rtx-a6000"),
    (&["3090"], "rtx-3090"),
    (&["4090"], "rtx-4090"),
    (&["2080"], "rtx-2080ti"),
    (&["1080"], "gtx-1080ti"),
    (&["titan", "rtx"], "titan-rtx"),
    (&["a10"], "a10"),
    (&["tpu", "v4"], "tpu-v4"),
    (&["tpu", "v5e"], "tpu-v5e"),
    (&["tpu", "v5p"], "tpu-v5p"),
    (&["tpu", "v6e"], "tpu-v6e"),
    (&["trillium"], "tpu-v6e"),
    (&["tpu", "v7"], "tpu-v7x"),
    (&["ironwood"], "tpu-v7x"),
];

const STACKS: &Names = &[
    (&["megatron-deepspeed", "bigscience"], "megatron-deepspeed-bigscience"),
    (&["megatron-deepspeed", "sailor"], "megatron-deepspeed-sailor"),
    (&["megatron-deepspeed"], "megatron-deepspeed"),
    (&["deepspeed 3d"], "deepspeed-3d"),
    (&["deepspeed", "megatron"], "megatron-deepspeed"),
    (&["deepspeed"], "deepspeed-zero"),
    (&["gpt-neox"], "megatron-deepspeed"),
    (&["megatron-bridge"], "megatron-bridge"),
    (&["automodel"], "nemo-automodel"),
    (&["finetuning"], "nemo"),
    (&["maxtext"], "maxtext"),
    (&["paxml"], "paxml"),
    (&["pax"], "paxml"),
    (&["nemo (dgxc"], "nemo"),
    (&["nemo 24"], "nemo"),
    (&["nemo 25"], "nemo"),
    (&["megatron-lm"], "megatron-core"),
    (&["megatron-core"], "megatron-core"),
    (&["megatron"], "megatron-core"),
    (&["torchtitan"], "torchtitan"),
    (&["mosaicml"], "mosaicml-composer"),
    (&["composer"], "mosaicml-composer"),
    (&["nanotron"], "nanotron"),
    (&["internevo"], "internevo"),
    (&["pytorch eager"], "pytorch-eager"),
    (&["fsdp"], "fsdp"),
    (&["deeplearningexamples", "pytorch"], "deeplearningexamples-pytorch"),
    (&["deeplearningexamples", "tensorflow2"], "deeplearningexamples-tensorflow2"),
    (&["deeplearningexamples", "tensorflow"], "deeplearningexamples-tensorflow"),
    (&["deeplearningexamples", "mxnet"], "mlperf-mxnet"),
    (&["deeplearningexamples", "paddlepaddle"], "deeplearningexamples-paddle"),
    (&["nemo"], "mlperf-nemo"),
];

fn find(names: &Names, text: &str) -> Option<&'static str> {
    names.iter().find(|(words, _)| words.iter().all(|word| has_word(text, word))).map(|(_, name)| *name)
}

/// Returns whether a text has a word, in any case. A word ends where letters and digits meet others
/// or each other: `RTX4090` has `4090` and `GB200` no `b200`. An underscore joins: `q_lora_rank`
/// has no `lora`.
pub(crate) fn has_word(text: &str, word: &str) -> bool {
    let text = text.to_lowercase();
    let kind = |character: char| match character {
        '0'..='9' => 1,
        _ if character.is_alphanumeric() || character == '_' => 2,
        _ => 0,
    };
    let joins = |before: Option<char>, after: Option<char>| {
        before.zip(after).is_some_and(|(left, right)| kind(left) != 0 && kind(left) == kind(right))
    };
    text.match_indices(word).any(|(start, found)| {
        let end = start + found.len();
        let (before, after) = (text[..start].chars().next_back(), text[end..].chars().next());
        !joins(before, found.chars().next()) && !joins(found.chars().next_back(), after)
    })
}

/// Returns the number of groups that a model divides its experts into, and the number of groups
/// that a token's experts are in (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", sections 2.1.2
/// and 4.2).
pub(crate) fn groups_of_token(row: &Row) -> Option<[usize; 2]> {
    (has_word(&row.model, "deepseek") && has_word(&row.model, "v3")).then_some([8, 4])
}

/// Returns whether the row is a submission to MLPerf, because it says so or names the round.
fn is_submission(row: &Row) -> bool {
    let has_round = row.notes.split("round v").nth(1).is_some_and(|rest| rest.starts_with(|digit: char| digit.is_ascii_digit()));
    has_round || [&row.framework, &row.notes].iter().any(|text| has_word(text, "mlperf"))
}

/// Returns the device profiles of a row's nodes with the number of nodes of each, in the row's
/// order. A row with several kinds says `3 nodes A + 1 node B`. Empty if a device is unknown.
pub(crate) fn node_kinds(row: &Row) -> Vec<(usize, &'static str)> {
    let part = |text: &str| {
        let nodes = text.split_once(" node").and_then(|(count, _)| count.trim().parse().ok()).unwrap_or(1);
        find(DEVICES, text).map(|device| (nodes, device))
    };
    row.gpu.split(" + ").map(part).collect::<Option<Vec<_>>>().unwrap_or_default()
}

/// Returns the stack to use for a framework without a profile, chosen by the compiler or
/// parallelism that its name mentions, otherwise by the row's layout.
pub(crate) fn nearest_stack(row: &Row) -> &'static str {
    const NEAREST: &Names = &[
        (&["jax"], "maxtext"),
        (&["xla"], "maxtext"),
        (&["levanter"], "maxtext"),
        (&["alpa"], "maxtext"),
        (&["torchtune"], "torchtune"),
        (&["picotron"], "nanotron"),
        (&["tensorflow"], "deeplearningexamples-tensorflow2"),
        (&["mxnet"], "mlperf-mxnet"),
        (&["torch", "compile"], "torchtitan-compiled"),
        (&["compiled"], "torchtitan-compiled"),
        (&["nanogpt"], "ddp"),
        (&["ddp"], "ddp"),
        (&["eager"], "pytorch-eager"),
    ];
    let is_sharded = |column| row.count(column).is_some_and(|size| size > 1);
    match find(NEAREST, &row.framework) {
        // XLA is the only compiler for TPUs.
        _ if is_tpu(row) => "maxtext-tpu",
        Some(name) => name,
        None if is_sharded("tp") || is_sharded("pp") => "megatron-core",
        None => "fsdp",
    }
}

/// Returns whether the run trains only adapters (LoRA).
pub(crate) fn trains_adapters(row: &Row) -> bool {
    let method = row.cells.get("method").map_or("", String::as_str);
    matches!(method, "lora" | "qlora")
        || (method.is_empty()
            && [&row.model, &row.notes, &row.framework].iter().any(|text| has_word(text, "lora") || has_word(text, "qlora")))
}

/// Returns the kernel that computes the row's loss. Other libraries' kernels that use Liger's fused
/// loss count as Liger's.
pub(crate) fn loss(row: &Row) -> LossKernel {
    let cell = |column: &str| row.cells.get(column).map_or("", String::as_str);
    match () {
        () if cell("loss").contains("chunked") => LossKernel::Chunked,
        () if cell("kernels").contains("liger") || row.notes.contains("liger fused") => LossKernel::Liger,
        () => LossKernel::Plain,
    }
}

/// Returns whether the row says that collectives over `tp` overlap with products.
pub(crate) fn overlaps_tensor(row: &Row) -> bool {
    has_word(&row.notes, "async tp")
}

/// Returns how the row's fp8 operands are scaled.
pub(crate) fn fp8_scaling(row: &Row) -> Fp8Scaling {
    let is_by_row = row.stated_precision.to_lowercase().contains("rowwise");
    if is_by_row { Fp8Scaling::Row } else { Fp8Scaling::Tensor }
}

/// Returns whether the loss is computed operator by operator. Compiled runs of torchtitan compile
/// the loss as well since 2025.
pub(crate) fn has_eager_loss(row: &Row) -> bool {
    !has_word(&row.notes, "compile") || is_of_2024(row)
}

/// Returns whether the row's `source_id` names a month of 2024, as `torchtitan_2412` does.
fn is_of_2024(row: &Row) -> bool {
    let month =
        row.cells.get("source_id").and_then(|name| name.split('_').find(|word| word.len() == 4 && word.starts_with("24")));
    month.is_some_and(|month| month.chars().all(|digit| digit.is_ascii_digit()))
}

/// Returns the first two numbers of a release: (26, 2) for `Megatron-Bridge 26.02.01`.
fn release(text: &str) -> Option<(u32, u32)> {
    let word = text.split(|character: char| !(character.is_ascii_digit() || character == '.')).find(|word| word.contains('.'))?;
    let mut numbers = word.split('.').map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

/// Returns the name of the profile of a row's software stack, or `None` if it has none.
///
/// The container image of an MLPerf submission has many frameworks, so the model decides.
pub(crate) fn stack(row: &Row) -> Option<&'static str> {
    if is_submission(row) {
        return Some(of_submission(row));
    }
    let name = find(STACKS, &row.framework)?;
    if is_tpu(row) && !["maxtext", "paxml"].contains(&name) {
        return None;
    }
    let is_nemo = ["nemo", "megatron-bridge", "mlperf-nemo"].contains(&name);
    if trains_adapters(row) && is_nemo {
        return Some("nemo-adapters");
    }
    let is_since = |first: (u32, u32)| release(&row.framework).is_some_and(|release| release >= first);
    Some(match name {
        "torchtitan" if has_word(&row.notes, "compile") => "torchtitan-compiled",
        // Runs in IEEE half precision predate Megatron Core and FlashAttention.
        "megatron-core" if has_word(&row.framework, "megatron-lm") && format(row) == Some(ProductFormat::Fp16) => {
            "megatron-lm-2022"
        }
        "megatron-bridge" if is_hopper(row) => "megatron-bridge-hopper",
        "megatron-bridge" if is_since((26, 6)) => "megatron-bridge-26.06",
        "megatron-bridge" if is_since((26, 0)) => "megatron-bridge-26.02",
        "nemo" if has_word(&row.framework, "nemo 24") => "nemo-2024",
        "deeplearningexamples-paddle" if format(row) == Some(ProductFormat::Fp16) => "deeplearningexamples-paddle-amp",
        "paxml" if is_since((23, 0)) && !is_since((24, 0)) && uses_transformer_engine(row) => "paxml-2023-te",
        "paxml" if is_since((23, 0)) && !is_since((24, 0)) => "paxml-2023",
        "maxtext" if is_tpu(row) => "maxtext-tpu",
        name => name,
    })
}

/// Returns the stack of an MLPerf submission.
fn of_submission(row: &Row) -> &'static str {
    if trains_adapters(row) {
        return "mlperf-adapters";
    }
    if has_word(&row.model, "resnet") {
        return "mlperf-mxnet";
    }
    if has_word(&row.model, "bert") {
        // MLPerf v0.7 was the last round whose submissions computed on padding.
        let is_padded = row.notes.contains("round v0.") || !has_word(&row.notes, "unpadded");
        return if is_padded { "mlperf-bert-2020" } else { "mlperf-bert" };
    }
    "mlperf-nemo"
}

fn is_hopper(row: &Row) -> bool {
    node_kinds(row).first().is_some_and(|(_, device)| ["h100", "h200", "h800", "h20"].iter().any(|kind| device.starts_with(kind)))
}

fn is_tpu(row: &Row) -> bool {
    node_kinds(row).first().is_some_and(|(_, device)| device.starts_with("tpu"))
}

/// Returns whether the row says that matrix products and attention come from Transformer Engine.
fn uses_transformer_engine(row: &Row) -> bool {
    row.stated_precision.to_lowercase().contains("transformer engine")
}

/// Returns the name of the profile of the link between devices of a node, if the row names another
/// than the device's usual one.
pub(crate) fn link(row: &Row) -> Option<&'static str> {
    let text = row.intra_link.to_lowercase();
    let is_pcie = text.contains("pcie") && !text.contains("nvl") && !row.gpu.contains(" + ");
    if is_pcie {
        return Some(if text.contains('5') {
            "pcie5"
        } else if text.contains('3') {
            "pcie3"
        } else {
            "pcie4"
        });
    }
    None
}

/// Returns the name of the profile of the network between nodes, if the row names one other than
/// InfiniBand. H100 instances were the first with EFA's second version.
pub(crate) fn network(row: &Row) -> Option<&'static str> {
    let any = |word: &str| [&row.notes, &row.intra_link, &row.gpu].iter().any(|text| has_word(text, word));
    let is_before_h100 = ["a100", "v100", "t4"].iter().any(|device| has_word(&row.gpu, device));
    if any("efa") {
        return Some(if is_before_h100 { "efa-1" } else { "efa-2" });
    }
    let named = [
        ("tcpxo", "tcpxo"),
        ("tcpx", "tcpx"),
        ("roce", "roce"),
        ("slingshot", "slingshot"),
        ("omni-path", "omni-path"),
        ("tcp", "tcp"),
        ("sockets", "tcp"),
    ];
    named.into_iter().find(|(word, _)| any(word)).map(|(_, network)| network)
}

/// Returns the format of matrix products, if the row states one that is known.
pub(crate) fn format(row: &Row) -> Option<ProductFormat> {
    let has = |word: &str| has_word(&row.precision, word);
    if row.stated_precision.to_lowercase().contains("tf32 off") {
        return Some(ProductFormat::Fp32);
    }
    if row.stated_precision.to_lowercase().contains("unknown") {
        return None;
    }
    Some(if has("nvfp4") || has("fp4") || has("mxfp4") {
        ProductFormat::Nvfp4
    } else if has("mxfp8") {
        ProductFormat::Mxfp8
    } else if has("fp8") || has("float8") {
        ProductFormat::Fp8
    } else if has("bf16") {
        ProductFormat::Bf16
    } else if has("fp16") || has("amp") || has("float16") {
        ProductFormat::Fp16
    } else if has("tf32") {
        ProductFormat::Tf32
    } else if has("fp32") || has("float32") {
        ProductFormat::Fp32
    } else {
        return None;
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(gpu: &str, framework: &str) -> Row {
        Row { gpu: gpu.into(), framework: framework.into(), ..Row::default() }
    }

    #[test]
    fn names_are_found_as_words() {
        assert!(has_word("LoRA rank 16", "lora") && has_word("(LoRA)", "lora") && !has_word("q_lora_rank 1536", "lora"));
        assert!(
            has_word("RTX4090", "4090") && has_word("MI300X", "mi300") && !has_word("GB200", "b200") && !has_word("A100", "a10")
        );
        let submission = Row { notes: "round v5.0; system x".into(), ..row("B200", "Dell / NGC PyTorch 25.04") };
        assert_eq!(stack(&submission), Some("mlperf-nemo"));
        // A slash in a framework does not make an MLPerf submission.
        assert_eq!(stack(&row("B200", "torchtitan / TorchAO")), Some("torchtitan"));
        let latent = Row { model: "DeepSeek-V3 (q_lora 1536)".into(), ..row("H100", "torchtitan") };
        assert_eq!(stack(&latent), Some("torchtitan"));
        let on_fsdp = Row { model: "Llama-3-8B LoRA".into(), ..row("H100", "torchtitan") };
        assert_eq!((stack(&on_fsdp), trains_adapters(&on_fsdp)), (Some("torchtitan"), true));
    }

    #[test]
    fn networks_are_read_from_what_the_row_says() {
        let on = |notes: &str, gpu: &str| network(&Row { notes: notes.into(), ..row(gpu, "") });
        assert_eq!(on("4x p4d (EFA)", "A100-SXM4-40GB"), Some("efa-1"));
        assert_eq!(on("GPUDirect-TCPXO", "H100"), Some("tcpxo"));
        assert_eq!(on("10 GbE, TCP sockets", "RTX 4090"), Some("tcp"));
        assert_eq!(on("8x400 Gb/s RoCE", "H100"), Some("roce"));
        assert_eq!(on("8x400 Gb/s InfiniBand", "H100"), None);
    }

    #[test]
    fn known_names_are_found_and_unknown_ones_are_not() {
        let kinds = |gpu| node_kinds(&row(gpu, ""));
        assert_eq!(kinds("A100-SXM4-80GB"), [(1, "a100-sxm-80g")]);
        assert_eq!(kinds("H100-SXM 96GB HBM2e 2.4TB/s 500W (Grand Teton)"), [(1, "h100-sxm-96g-500w")]);
        assert_eq!(kinds("GB200"), [(1, "gb200")]);
        assert_eq!(kinds("V100-SXM3-32GB (DGX-2)"), [(1, "v100-sxm3-32g")]);
        assert_eq!(kinds("V100-PCIe-32GB"), [(1, "v100-pcie-32g")]);
        assert_eq!(kinds("3 nodes V100-SXM2-16GB (p3.8xlarge) + 1 node T4 (g4dn.12xlarge)"), [(3, "v100-sxm-16g"), (1, "t4")]);
        assert_eq!(kinds("abacus"), []);
        assert_eq!(kinds("A100 + abacus"), []);
        assert_eq!(stack(&row("", "Megatron-DeepSpeed (1F1B)")), Some("megatron-deepspeed"));
        assert_eq!(stack(&row("", "my own")), None);
        let on_tpu = row("TPU v5p", "PyTorch FSDP (XLA)");
        assert_eq!((stack(&on_tpu), nearest_stack(&on_tpu)), (None, "maxtext-tpu"));
        assert_eq!(stack(&row("", "DeepSpeed 0.9")), Some("deepspeed-zero"));
        assert_eq!(stack(&row("", "Megatron-Bridge 26.02.01")), Some("megatron-bridge-26.02"));
        assert_eq!(stack(&row("", "Megatron-Bridge 25.11")), Some("megatron-bridge"));
        assert_eq!(stack(&row("", "Paxml (JAX-Toolbox 23.08)")), Some("paxml-2023"));
        let engine = Row { stated_precision: "bf16 (Transformer Engine)".into(), ..row("", "Paxml (JAX-Toolbox 23.08)") };
        assert_eq!(stack(&engine), Some("paxml-2023-te"));
        assert_eq!(stack(&row("H100-SXM5-80GB", "Megatron-Bridge 26.02.01")), Some("megatron-bridge-hopper"));
        let half = Row { precision: "fp16".into(), ..row("", "Megatron-LM") };
        assert_eq!((stack(&half), stack(&row("", "Megatron-LM"))), (Some("megatron-lm-2022"), Some("megatron-core")));
        let half = Row { precision: "fp16".into(), ..row("", "NVIDIA DeepLearningExamples PaddlePaddle") };
        let full = Row { precision: "tf32".into(), ..half.clone() };
        assert_eq!((stack(&half), stack(&full)), (Some("deeplearningexamples-paddle-amp"), Some("deeplearningexamples-paddle")));
        let loss_is_eager = |source: &str, notes: &str| {
            let mut row = Row { notes: notes.into(), ..row("H100", "torchtitan") };
            row.cells.insert("source_id".into(), source.into());
            has_eager_loss(&row)
        };
        assert!(loss_is_eager("torchtitan_2412", "torch.compile") && loss_is_eager("torchtitan_2506_h200", "eager"));
        assert!(!loss_is_eager("torchtitan_2506_h200", "torch.compile") && !loss_is_eager("", "torch.compile"));
        let on_efa = Row { notes: "4x p5.48xlarge (EFA 3200 Gb/s)".into(), ..row("H100-SXM5-80GB", "") };
        assert_eq!((network(&on_efa), network(&row("H100-SXM5-80GB", ""))), (Some("efa-2"), None));
    }
}
