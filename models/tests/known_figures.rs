//! The zoo's models against published figures: parameters, arithmetic, names and shapes.

use foretell_models::{DropoutRate, Gpt, Graph, GraphOptions, Kernel, Mlp, Model, Resnet, Role, differentiate};
use foretell_units::diagnostic::one_line;

const ONE: GraphOptions = GraphOptions::ONE;

fn graph(name: &str) -> Graph {
    Model::named(name).expect("in the zoo").graph(name, &ONE).expect("it is sound")
}

#[test]
fn every_model_has_the_published_number_of_parameters() {
    // torchvision's table of classification models, and Hugging Face's `num_parameters()`.
    let published = [
        ("resnet18", 11_689_512),
        ("resnet34", 21_797_672),
        ("resnet50", 25_557_032),
        ("resnet101", 44_549_160),
        ("resnet152", 60_192_808),
        ("gpt2", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
        ("mixtral-8x7b", 46_702_792_704),
        ("mixtral-8x22b", 140_620_634_112),
        ("t5-small", 60_506_624),
        ("t5-base", 222_903_552),
        ("flan-t5-small", 76_961_152),
        // The first tutorial of github.com/bentrevett/pytorch-seq2seq, on Multi30k.
        ("lstm-seq2seq", 13_898_501),
        // torchvision's table, and `num_parameters()` of `LlamaForCausalLM` and `BertForMaskedLM`.
        ("vgg11", 132_863_336),
        ("vgg13", 133_047_848),
        ("vgg16", 138_357_544),
        ("vgg19", 143_667_240),
        ("vgg11_bn", 132_868_840),
        ("vgg13_bn", 133_053_736),
        ("vgg16_bn", 138_365_992),
        ("vgg19_bn", 143_678_248),
        ("vit_b_16", 86_567_656),
        ("vit_b_32", 88_224_232),
        ("vit_l_16", 304_326_632),
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
        ("llama3-8b", 8_030_261_248),
        ("llama3-70b", 70_553_706_496),
        ("llama3-405b", 405_853_388_800),
        ("bert-base-uncased", 109_514_298),
        ("bert-large-uncased", 335_174_458),
    ];
    for (name, parameters) in published {
        assert_eq!(graph(name).parameter_count(), parameters, "{name}");
    }
}

#[test]
fn a_forward_pass_has_the_published_multiply_adds() {
    // torchvision's table, column GFLOPS, where a multiply-add counts once.
    for (name, published) in [("resnet18", 1.81e9), ("resnet50", 4.09e9)] {
        let multiply_adds = graph(name).model_flops().value() / 2.0;
        assert!((multiply_adds / published - 1.0).abs() < 0.005, "{name}: {multiply_adds}");
    }
}

#[test]
fn gradients_take_twice_the_forward_arithmetic_except_for_the_samples() {
    for name in ["mlp", "resnet18", "resnet50", "gpt2", "mixtral-8x7b", "t5-small", "lstm-seq2seq"] {
        let graph = graph(name);
        let forward = graph.model_flops().value();
        // The input gradient of a first product is not made, since samples are not trained. A model
        // of tokens begins with a look-up instead.
        let first = graph.operators.iter().find(|operator| {
            let is_product = matches!(operator.kind, Kernel::Matmul { .. } | Kernel::Convolution(_));
            is_product && matches!(graph.tensor(operator.inputs[0].tensor).role, Role::Input(_))
        });
        let saved = first.map_or(0.0, |operator| operator.kernel(&operator.extents()).model_flops().value());
        assert_eq!(saved == 0.0, graph.tokens_per_sample.is_some(), "{name}");
        let backward = differentiate(&graph, 1, |_| false).model_flops().value() - forward;
        assert!((backward / (2.0 * forward - saved) - 1.0).abs() < 1e-12, "{name}: {backward} of {forward}");
    }
}

#[test]
fn stacked_experts_have_one_public_tensor_each() {
    let graph = graph("mixtral-8x7b");
    let module = "model.layers.31.block_sparse_moe";
    let find = |name: &str| graph.parameters().find(|(_, tensor)| tensor.name == name).expect("such a parameter").1;
    let stacked = find(&format!("{module}.experts.w2.weight"));
    let public = stacked.public_tensors();
    assert_eq!(public.len(), 8);
    let one = 4096 * 14336;
    for (expert, tensor) in public.iter().enumerate() {
        assert_eq!(tensor.name, format!("{module}.experts.{expert}.w2.weight"));
        assert_eq!((&tensor.shape[..], &tensor.elements), (&[4096, 14336][..], &(expert * one..(expert + 1) * one)));
    }
    assert_eq!(stacked.elements(), 8 * one);
    let router = find(&format!("{module}.gate.weight"));
    assert_eq!(router.public_tensors()[0].name, router.name);
    assert_eq!(router.public_tensors()[0].shape, [8, 4096]);
}

#[test]
fn parameters_have_their_public_names_and_shapes() {
    let expected: [(&str, &str, &[usize]); 24] = [
        ("resnet50", "conv1.weight", &[64, 3, 7, 7]),
        ("resnet50", "bn1.weight", &[64]),
        ("resnet50", "layer1.0.downsample.0.weight", &[256, 64, 1, 1]),
        ("resnet50", "layer4.2.conv2.weight", &[512, 512, 3, 3]),
        ("resnet50", "fc.weight", &[1000, 2048]),
        ("gpt2", "transformer.wte.weight", &[50257, 768]),
        ("gpt2", "transformer.h.0.attn.c_attn.weight", &[768, 2304]),
        ("gpt2", "transformer.h.0.attn.c_attn.bias", &[2304]),
        ("gpt2", "transformer.h.11.mlp.c_proj.weight", &[3072, 768]),
        ("llama3-8b", "model.embed_tokens.weight", &[128_256, 4096]),
        ("llama3-8b", "model.layers.31.self_attn.q_proj.weight", &[4096, 4096]),
        ("llama3-8b", "model.layers.0.self_attn.k_proj.weight", &[1024, 4096]),
        ("llama3-8b", "model.layers.0.self_attn.o_proj.weight", &[4096, 4096]),
        ("llama3-8b", "model.layers.0.mlp.down_proj.weight", &[4096, 14_336]),
        ("llama3-8b", "model.norm.weight", &[4096]),
        ("bert-base-uncased", "bert.embeddings.token_type_embeddings.weight", &[2, 768]),
        ("bert-base-uncased", "bert.encoder.layer.11.attention.output.LayerNorm.bias", &[768]),
        ("bert-base-uncased", "cls.predictions.transform.dense.weight", &[768, 768]),
        ("bert-base-uncased", "cls.predictions.bias", &[30522]),
        ("vit_b_16", "conv_proj.weight", &[768, 3, 16, 16]),
        ("vit_b_16", "encoder.pos_embedding", &[1, 197, 768]),
        ("vit_b_16", "encoder.layers.encoder_layer_0.self_attention.in_proj_weight", &[2304, 768]),
        ("vgg16", "features.28.weight", &[512, 512, 3, 3]),
        ("vgg16", "classifier.0.weight", &[4096, 25_088]),
    ];
    for (model, name, shape) in expected {
        let graph = graph(model);
        let (_, tensor) = graph.parameters().find(|(_, tensor)| tensor.name == name).expect("such a parameter");
        let Role::Parameter(parameter) = &tensor.role else { unreachable!("it is one of the parameters") };
        assert_eq!(parameter.shape, shape, "{model} {name}");
        assert_eq!(parameter.shape.iter().product::<usize>(), tensor.elements());
        let mut permuted: Vec<usize> = parameter.permutation.iter().map(|&place| tensor.dimensions[place].extent).collect();
        if permuted.len() == shape.len() {
            assert_eq!(permuted, shape, "{model} {name}");
        }
        permuted.sort_unstable();
        let mut ours: Vec<usize> = tensor.dimensions.iter().map(|dimension| dimension.extent).collect();
        ours.sort_unstable();
        assert_eq!(permuted, ours, "every dimension once");
    }
}

#[test]
fn sizes_beyond_any_machine_are_refused_with_a_hint() {
    let gpt = |layers, hidden, sequence, vocab| {
        Model::Gpt(Gpt {
            layers,
            hidden,
            heads: 1,
            ffn: None,
            vocab,
            sequence,
            tied_embeddings: true,
            dropout: DropoutRate::NONE,
            attention_dropout: DropoutRate::NONE,
        })
    };
    let resnet = Model::Resnet(Resnet {
        depth: 50,
        stem: Default::default(),
        image: 8192,
        channels: 1 << 24,
        classes: 10,
        width: 1 << 24,
    });
    let many = 1 << 32;
    let cases = [
        (gpt(10_001, 16, 8, 32), 1, "`layers` is 10001"),
        (Model::Mlp(Mlp { widths: vec![2; 10_002] }), 1, "`widths` has 10002 entries"),
        (gpt(1, 1 << 24, 8, 1 << 24), 1, "`transformer.h.0.attn.c_attn.weight`"),
        (gpt(1, 16, 1 << 24, 32), many, "more than 2^48 elements"),
        (Model::Mlp(Mlp { widths: vec![1 << 24, 2] }), many, "`features` (batch 4294967296, features 16777216)"),
        (resnet, many, "more than 2^48 elements"),
        (Model::Mlp(Mlp { widths: vec![4, 2] }), many + 1, "a batch of 4294967297 samples"),
        (Model::Mlp(Mlp { widths: vec![4, 2] }), usize::MAX, "a batch of"),
        (Model::Mlp(Mlp { widths: vec![4, 2] }), 0, "a batch of 0 samples"),
    ];
    for (model, batch, expected) in cases {
        let error = one_line(&model.graph("m", &GraphOptions { batch, ..ONE }).expect_err(expected));
        assert!(error.contains(expected) && error.contains("hint: "), "{error}");
    }
}
