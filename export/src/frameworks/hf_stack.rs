//! The software stacks of Hugging Face jobs: those that imported plans get, and those with which
//! plans are exported. Our profiles know these names. It must not know files.

use super::stated::Stated;
use foretell_program::{Layout, Plan, Stack};

/// Stacks whose plans are jobs of PyTorch's DDP or FSDP under a Trainer or Accelerate.
pub(super) const PYTORCH: [&str; 6] = ["hf-trainer", "trl", "accelerate", "axolotl", "llama-factory", FSDP2];

/// Stacks whose plans are jobs of DeepSpeed's ZeRO.
pub(super) const DEEPSPEED: [&str; 3] = ["hf-deepspeed", "deepspeed-zero", FSDP2];

/// PyTorch's FSDP2 in general, for layouts that the other stacks' profiles lack.
pub(super) const FSDP2: &str = "fsdp2";

/// The Trainer with PyTorch's first FSDP, and TRL's. An imported plan has the first of them until
/// its file's library is known.
pub(super) const FSDP1: [&str; 2] = ["hf-trainer-fsdp1", "trl-fsdp1"];

/// Where FSDP's version comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum VersionSource {
    /// The file states it.
    File,
    /// `accelerate launch` takes the first one, as no file states any.
    Launcher,
}

/// Whether neither operators nor sequences are sharded.
fn is_usual(layout: &Layout) -> bool {
    layout.tensor == 1 && layout.context == 1
}

/// The stack of a layout under DDP or FSDP. `usual` is the stack of the file's library.
pub(super) fn of_pytorch(layout: &Layout, usual: &'static str) -> &'static str {
    // The operator tables and the profile have DDP, and FSDP that frees parameters after the
    // forward pass.
    if is_usual(layout) && [0, 3].contains(&layout.zero) { usual } else { FSDP2 }
}

/// The same of an imported plan, whose file may state FSDP's first version.
pub(super) fn of_imported(plan: &Plan, usual: &'static str) -> &'static str {
    let [trainer, trl] = FSDP1;
    match of_pytorch(&plan.layout, usual) {
        name if plan.stack.name() != trainer || plan.layout.zero != 3 || name == FSDP2 => name,
        "trl" => trl,
        _ => trainer,
    }
}

/// The stack of a layout under DeepSpeed. `usual` is the stack of the file's library.
pub(super) fn of_deepspeed(layout: &Layout, usual: &'static str) -> &'static str {
    if is_usual(layout) { usual } else { FSDP2 }
}

/// Sets the stack of an imported plan, and notes it.
pub(super) fn choose(stated: &mut Stated, plan: &mut Plan, name: &'static str, usual: &'static str) {
    choose_of_pytorch(stated, plan, name, usual, VersionSource::File);
}

/// As [`choose`], for a stack that may depend on FSDP's version.
pub(super) fn choose_of_pytorch(
    stated: &mut Stated,
    plan: &mut Plan,
    name: &'static str,
    usual: &'static str,
    version: VersionSource,
) {
    let what = match name {
        "trl" => "TRL on PyTorch's DDP or FSDP2",
        "hf-trainer" => "Hugging Face's Trainer and Accelerate on PyTorch's DDP or FSDP2",
        name if FSDP1.contains(&name) => match version {
            VersionSource::File => "Hugging Face's Trainer, TRL or Accelerate on PyTorch's first FSDP, as the file says",
            VersionSource::Launcher => {
                "Hugging Face's Trainer, TRL or Accelerate on PyTorch's first FSDP, which `accelerate launch` takes where no file states \
                 `fsdp_version`"
            }
        },
        "hf-deepspeed" => "Hugging Face's Trainer and Accelerate on DeepSpeed",
        "deepspeed-zero" => "DeepSpeed without a Trainer",
        FSDP2 => "PyTorch's FSDP2",
        _ => unreachable!("invariant: no file is read as one of `{name}`"),
    };
    if name == usual || FSDP1.contains(&name) {
        stated.assume(format!("`stack` {name}: {what}"));
    } else {
        stated.assume(format!("`stack` {name}: {what}, as `{usual}` has no such layout"));
    }
    plan.stack = Stack::new(name);
}

/// The stack of an exported plan: the requested one if the framework's jobs have it, otherwise the
/// one that the files are read back with.
pub(super) fn kept(asked: &Stack, accepted: &[&str], read_back: &'static str) -> Stack {
    if accepted.contains(&asked.name()) { asked.clone() } else { Stack::new(read_back) }
}
