//! The compiler's use of stack memory does not depend on the number of layers.

use foretell_models::{DropoutRate, Gpt, Model};
use foretell_program::{Layout, Plan, compile_training};

#[test]
fn a_thousand_layers_compile_in_a_small_stack() {
    let model = Model::Gpt(Gpt {
        layers: 1000,
        hidden: 8,
        heads: 2,
        ffn: None,
        vocab: 16,
        sequence: 8,
        tied_embeddings: false,
        dropout: DropoutRate::NONE,
        attention_dropout: DropoutRate::NONE,
    });
    // Sums of partial sums of gradients nest through all layers.
    let plan = Plan::new(Layout { tensor: 2, ..Layout::default() }, 1);
    let compile = move || compile_training(&model, "model", &plan).map(|program| program.lists.len());
    let thread = std::thread::Builder::new().stack_size(256 << 10).spawn(compile).expect("a thread");
    assert_eq!(thread.join().expect("no stack overflow").expect("a plan that fits"), 1);
}
