//! How many modules DeepSpeed calls for what a table names.

/// Modules of an expert that is modules of its own: three layers, an activation, and itself. Where
/// the table has two weights of all experts in place of these modules, they are counted by weight.
pub(super) const MODULES_OF_EXPERT: u64 = 5;
/// Weights of all experts that such a table has in place of their modules.
pub(super) const WEIGHTS_OF_EXPERTS: u64 = 2;
/// The same with adapters on each of the three layers, which calls four modules more then: the
/// layer below (`base_layer`), two products, and dropout, which runs at a rate of zero too
/// (`forward` in `peft/tuners/lora/layer.py`).
pub(super) const MODULES_OF_ADAPTED_EXPERT: u64 = MODULES_OF_EXPERT + 3 * 4;

/// The modules that a name of a table stands for, given the number of experts. An expert has an
/// activation beside the layers that have names. With adapters, a layer's names are as many as the
/// modules that it calls.
pub(super) fn modules_named(module: &str, experts: u64) -> u64 {
    match (module.contains(".*"), module.ends_with(".*")) {
        (true, true) => 2 * experts,
        (true, false) => experts,
        (false, _) => 1,
    }
}
