//! A model may have as many layers as it likes: what follows them from one to the next takes no stack for each.

use foretell_models::{DropoutRate, Gpt, Model};
use foretell_program::{Layout, Plan, compile_training};

#[test]
fn a_thousand_layers_need_no_more_stack_than_one() {
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
    // Partial sums of gradients wait for each other through all layers.
    let plan = Plan::new(Layout { tensor: 2, ..Layout::default() }, 1);
    let compile = move || compile_training(&model, "model", &plan).map(|program| program.lists.len());
    let thread = std::thread::Builder::new().stack_size(256 << 10).spawn(compile).expect("a thread");
    assert_eq!(thread.join().expect("it ends").expect("it can be laid out"), 1);
}
