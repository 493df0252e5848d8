use foretell_models::*;
#[test]
fn scratch() {
    for path in std::env::var("TRACES").unwrap().split(',') {
        let text = std::fs::read_to_string(path).unwrap();
        assert!(is_torch_trace(&text));
        match from_torch(&text, None) {
            Err(e) => println!("{path}: ERROR {e}"),
            Ok(i) => {
                println!("{path}\n  {}", i.notes.join("\n  "));
                match i.model.graph("x", &GraphOptions { batch: 2, ..GraphOptions::ONE }) {
                    Err(e) => println!("GRAPH ERROR {e}"),
                    Ok(g) => {
                        let t = differentiate(&g, 1, |_| false);
                        println!("  parameters {} forward {:.4e} all {:.4e} operators {} {} blocks {:?}", g.parameter_count(), g.model_flops().value(), t.model_flops().value(), g.operators.len(), t.operators.len(), g.blocks.iter().map(|b| b.name.clone()).collect::<Vec<_>>());
                    }
                }
            }
        }
    }
}
